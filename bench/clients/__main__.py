"""Sweep of clients against a real server with a scripted model: `python -m bench.clients [--only openai-python,...]`.

Each client runs in an environment of its own, which is made at its first run (`~/.cache/headway-bench/clients`), and is
checked in four ways: text, stream, structured output and tools, or by embeddings. The outcomes go to
`bench/results/clients.json`. With `--only` the other clients keep theirs. The exit code is 1 if a client of the gate
does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.clients.environments import CLIENTS, CannotInstall, Client
from bench.clients.page import GATE, NAME, WAYS
from bench.clients.scenario import MODEL, SCENARIO, SCRIPTS
from bench.record import RESULTS, write
from bench.serving import REAL, serving
from testkit.model.pooling_checkpoints import PoolingFiles
from testkit.model.scripted_checkpoint import write_scripted_checkpoint

_LIMIT_S = 300.0
_CONTEXT, _KV_CACHE_BYTES = 2**18, 2**32
"""Context of the model, tokens, and its KV cache: agents' prompts have 50,000 tokens of a byte each, about."""
_MARK = "OUTCOME "

Outcome = dict[str, Any]


def main() -> int:
    """Run the sweep; return 1 if a client of the gate does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of clients, with commas between them")
    parser.add_argument("--base-url", help="a running server with the scripted model, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--output", default=NAME, help="name of the result's file")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [client.name for client in CLIENTS]
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if client.name in names]
    outcomes = run_at(options.base_url, chosen) if options.base_url else run_all(chosen)
    found = {**_earlier(options.output), **outcomes}
    ordered = {client.name: found[client.name] for client in CLIENTS if client.name in found}
    print(write(options.output, {"clients": ordered}))
    return int(any(client.name in GATE and not is_passed(outcomes[client.name]) for client in chosen))


def run_all(clients: list[Client]) -> dict[str, Outcome]:
    """Serve the scripted model and run the clients against it."""
    with tempfile.TemporaryDirectory(prefix="hw-clients-") as folder:
        checkpoint = write_scripted_checkpoint(Path(folder) / MODEL, SCRIPTS, _CONTEXT)
        hidden_size = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
        PoolingFiles("mean").write(checkpoint, hidden_size)
        options = {"model": checkpoint, "served_model_name": MODEL, "kv_cache_bytes": _KV_CACHE_BYTES}
        with serving(REAL, options) as served:
            return run_at(f"{served.url}/v1", clients)


def run_at(base_url: str, clients: list[Client]) -> dict[str, Outcome]:
    """Run the clients one after another against a server."""
    outcomes = {}
    for client in clients:
        outcome = outcomes[client.name] = run_client(client, base_url)
        ways = ", ".join(f"{name} {way['outcome']}" for name, way in outcome["ways"].items())
        print(f"{client.name}: {ways or outcome['reason']}", flush=True)
        for name, way in outcome["ways"].items():
            if way["outcome"] != "passed":
                print(f"  {name}: {way.get('reason', '')}", flush=True)
    return outcomes


def run_client(client: Client, base_url: str) -> Outcome:
    """Return the versions of a client and its outcome in each way; without ways there is a reason."""
    try:
        client.install()
    except CannotInstall as error:
        return {"ways": {}, "reason": f"cannot be installed: {error}"}
    variables = {"HEADWAY_BASE_URL": base_url, "HEADWAY_SCENARIO": json.dumps(SCENARIO), "OPENAI_API_KEY": "none"}
    try:
        result = subprocess.run(
            client.command(), cwd=client.directory, env=_environment() | variables, capture_output=True,
            text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ways": {}, "reason": f"did not end within {_LIMIT_S:g} s"}
    printed = [line.removeprefix(_MARK) for line in result.stdout.splitlines() if line.startswith(_MARK)]
    lines = [json.loads(line) for line in printed]
    versions = {name: number for line in lines for name, number in line.get("versions", {}).items()}
    ways = {line.pop("way"): line for line in lines if "way" in line}
    if os.environ.get("HEADWAY_TRACEBACKS"):
        print(result.stderr, file=sys.stderr)
    reason = {} if ways else {"reason": result.stderr.strip()[-400:]}
    return {"versions": versions, "ways": ways, **reason}


def is_passed(outcome: Outcome) -> bool:
    """Return True if a client passed in all ways."""
    return all(outcome["ways"].get(way, {}).get("outcome") == "passed" for way in WAYS)


def _environment() -> dict[str, str]:
    """Return the variables of the clients, which know nothing of this project's environment."""
    left_out = ("PYTHON", "VIRTUAL_ENV", "OPENAI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}


def _earlier(name: str) -> dict[str, Outcome]:
    """Return the outcomes that the result's file has."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Outcome] = json.loads(path.read_text())["clients"] if path.exists() else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
