"""Ours and every peer that is installed, one after the other: `python -m bench.peers`."""

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

from bench.models import SHAPES, model_directory
from bench.peers.driver import RESULT
from bench.peers.registry import Peer, read_peers
from bench.peers.report import Record, by_engine, plot, table
from bench.record import RESULTS, write

_ROOT = Path(__file__).resolve().parents[2]
_LIST = Path(__file__).with_name("peers.toml")
_MODELS = Path("~/.cache/headway-bench/models").expanduser()


def main() -> None:
    """Run them, print the table, write the records and the plot."""
    arguments, options = _parser().parse_known_args()
    model = arguments.model or model_directory(arguments.models, arguments.shape)
    name = f"peers_{model.name}{'_partial' if arguments.only else ''}"
    records: list[Record] = []
    for peer in arguments.rounds * _installed(read_peers(arguments.peers), model, arguments.only):
        print(f"{peer.name} ...", flush=True)
        records += _run(peer, model, options)
        # After each: the next may take minutes, and be interrupted.
        path = write(name, "python -m bench.peers " + " ".join(sys.argv[1:]), {"records": records})
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
        description=__doc__, epilog="What is not known here goes to every runner: --reps 1 --modes workload ..."
    )
    parser.add_argument("--peers", type=Path, default=_LIST, help="file of engines")
    parser.add_argument("--only", help="those whose names contain one of these words, separated by commas")
    parser.add_argument("--rounds", type=int, default=1, help="of all engines, where the machine's speed changes")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="S", help="made with random weights where missing")
    parser.add_argument("--models", type=Path, default=_MODELS, help="where those are kept")
    parser.add_argument("--model", type=Path, help="another model's directory")
    return parser


def _installed(peers: list[Peer], model: Path, only: str | None) -> list[Peer]:
    """Those wanted that can be run; tells what the others lack."""
    installed = []
    for peer in peers:
        if only and not any(word in peer.name for word in only.split(",")):
            continue
        missing = peer.missing(model)
        if missing:
            print(f"{peer.name}: left out, there is no {', '.join(missing)}", flush=True)
        else:
            installed.append(peer)
    return installed


def _run(peer: Peer, model: Path, options: Sequence[str]) -> list[Record]:
    """The records of one engine; those before a failure count, and the failure is told."""
    own = [] if "--modes" in options else ["--modes", peer.modes]
    with tempfile.NamedTemporaryFile("w+", prefix="hw-peer-", suffix=".log") as log:
        # The first thread pool that starts reads its size here, before the engine can say it.
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
