"""Run Headway and every installed peer, one after another: `python -m bench.peers`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.engine.models import SHAPES, model_directory
from bench.peers.driver import RESULT
from bench.peers.registry import Peer, read_peers
from bench.peers.report import Record, by_engine, plot, table
from bench.record import RESULTS, write

_ROOT = Path(__file__).resolve().parents[2]
_LIST = Path(__file__).with_name("peers.toml")
_MODELS = Path("~/.cache/headway-bench/models").expanduser()


def main() -> None:
    """Run the engines, print the table, write the records and the plot."""
    arguments, options = _parser().parse_known_args()
    model = arguments.model or model_directory(arguments.models, arguments.shape)
    name = f"peers_{model.name}{'_partial' if arguments.only else ''}"
    records: list[Record] = []
    for peer in arguments.rounds * _installed(read_peers(arguments.peers), model, arguments.only):
        print(f"{peer.name} ...", flush=True)
        records += _run(peer, model, options)
        # Write after each engine: the next may take minutes and may be interrupted.
        path = write(name, {"records": records})
    if not records:
        sys.exit("nothing was measured")
    print(path)
    engines = by_engine(records)
    title = f"model {model.name}: 48 requests, at most 16 together"
    Console(width=180).print(table(engines, title))
    try:
        plot(engines, title, RESULTS / f"{name}.png")
    except ImportError:
        print("no plot: pip install '.[bench]' brings matplotlib")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Other options go to every runner: --reps 1 --modes workload ..."
    )
    parser.add_argument("--peers", type=Path, default=_LIST, help="file of engines")
    parser.add_argument("--only", help="run these engines (comma-separated): names, or words that names contain")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds over all engines; more help where the machine's speed changes"
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="S", help="shape of a random model, made if missing")
    parser.add_argument("--models", type=Path, default=_MODELS, help="directory of the random models")
    parser.add_argument("--model", type=Path, help="directory of another model, instead of --shape")
    return parser


def _installed(peers: list[Peer], model: Path, only: str | None) -> list[Peer]:
    """Return the chosen engines that can run; print what the others lack."""
    installed = []
    words = only.split(",") if only else [""]
    are_names = set(words) <= {peer.name for peer in peers}
    for peer in peers:
        if not (peer.name in words if are_names else any(word in peer.name for word in words)):
            continue
        missing = peer.missing(model)
        if missing:
            print(f"{peer.name}: left out, there is no {', '.join(missing)}", flush=True)
        else:
            installed.append(peer)
    return installed


def _run(peer: Peer, model: Path, options: Sequence[str]) -> list[Record]:
    """Return the records of one engine; those before a failure count, and the failure is printed."""
    own = [] if "--modes" in options else ["--modes", peer.modes]
    with tempfile.NamedTemporaryFile("w+", prefix="hw-peer-", suffix=".log") as log:
        # Set here: the first thread pool to start reads its size before the engine can set it.
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        command = peer.command(model, [*own, *options])
        ended = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        if ended.returncode != 0:
            log.seek(0)
            print(f"{peer.name}: ended with {ended.returncode}:\n{log.read()[-1500:]}", flush=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(RESULT)]
    return [json.loads(line.removeprefix(RESULT)) for line in lines]


if __name__ == "__main__":
    main()
