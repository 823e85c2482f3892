"""Files of the product that one request crosses, in two lists: `python -m bench.files_crossed [--checkout DIR]`.

Serves the demo model on Ray Serve and sends streamed chats of one token, one after the other. A profile function in
each process (`bench/call_trace.py`) notes which function calls which.

- `inbound`: files from the request's arrival at the edge, in Serve's proxy, to the call of `Scheduler.add`.
- `outbound`: files from the return of the runner's `collect` to the end of the answer, as the client reads it. There
  is one token, so that no further step runs in this time.

A file counts if most requests call a function in it. A generated function of a dataclass is in the file of its class.
Code that runs at import does not count. A call that one function makes of another while the application is idle is
background, and does not count.

Errors: Time divides the parts, in all processes at once. So `outbound` has what the ingress does at a request's end,
and a call of the ingress that comes after `Scheduler.add` is in no list. Background that runs only beside requests
counts if it meets most of them. A request's own call does not count if the same function also makes it in the idle
time: the statistics of the engine. A file without functions in Python is not seen, such as one of constants or of
pydantic's fields. `in_some` names files that only some requests crossed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import call_trace
from bench.call_trace import CHECKOUT_VARIABLE, INBOUND, OUTBOUND, Call, Switch
from bench.record import RESULTS, write
from bench.serving import REAL
from serve_app.config import DEMO_MODEL_NAME
from testkit.serving.served import ROOT, Served, running

NAME = "files_crossed"
IDLE = 1
"""Number of the span without a request; those of the requests follow."""
_NUM_WARM_UPS = 3
_NUM_REQUESTS = 9
_PAUSE_S = 0.5
"""Time between two requests."""
_SETTLE_S = 3.0
"""Time before the idle span: the polls that tell of the last warm-up are over then. They come each second."""
_IDLE_S = 8.0
"""Duration of the idle span. The slowest frequent loop of an ingress or a replica runs each 5 s."""
_PARTS = {"inbound": "the ASGI edge to Scheduler.add", "outbound": "the runner's result to the SSE bytes"}


@dataclass(frozen=True, slots=True)
class Crossing:
    """Files that requests cross in one part of their lives."""

    count: int
    files: tuple[str, ...]
    """In the order of their first calls."""
    in_some: tuple[str, ...]
    """Files that some requests crossed and others did not."""


def crossing(calls: Iterable[Call], part: int) -> Crossing:
    """Return the files that most requests cross in a part of their lives."""
    background: set[tuple[str, str, str]] = set()
    requests: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.at_ns):
        if call.span == IDLE:
            background.add((call.caller, call.file, call.function))
        else:
            requests[call.span].append(call)
    delays_ns: dict[str, list[int]] = defaultdict(list)
    for made in requests.values():
        firsts: dict[str, int] = {}
        for call in made:
            if call.part == part and (call.caller, call.file, call.function) not in background:
                firsts.setdefault(call.file, call.at_ns - made[0].at_ns)
        for file, delay_ns in firsts.items():
            delays_ns[file].append(delay_ns)
    most = [file for file, delays in delays_ns.items() if 2 * len(delays) > len(requests)]
    in_some = sorted(file for file, delays in delays_ns.items() if len(delays) < len(requests))
    return Crossing(len(most), tuple(sorted(most, key=lambda file: median(delays_ns[file]))), tuple(in_some))


def measure(checkout: Path) -> dict[str, Any]:
    """Serve the code of a checkout; return its commit and the files that requests cross."""
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as name:
        folder = Path(name)
        (home := folder / "home").mkdir()
        (folder / "sitecustomize.py").symlink_to(call_trace.__file__)
        switch = Switch(folder / "switch")
        variables = {"PYTHONPATH": f"{checkout}{os.pathsep}{folder}", CHECKOUT_VARIABLE: str(checkout)}
        with running("bench.serving", ["--app", REAL, f"model={DEMO_MODEL_NAME}"], home, checkout, variables) as served:
            _send_requests(served, switch)
        calls = [Call(**json.loads(line)) for file in folder.glob("*.calls") for line in file.read_text().splitlines()]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=False)
    parts = {"inbound": crossing(calls, INBOUND), "outbound": crossing(calls, OUTBOUND)}
    return {"commit": git.stdout.strip(), **{name: asdict(each) for name, each in parts.items()}}


def _send_requests(served: Served, switch: Switch) -> None:
    for _ in range(_NUM_WARM_UPS):
        _chat(served)
    time.sleep(_SETTLE_S)
    switch.begin(IDLE)
    time.sleep(_IDLE_S)
    switch.end()
    for span in range(IDLE + 1, IDLE + 1 + _NUM_REQUESTS):
        switch.begin(span)
        _chat(served)
        switch.end()
        if switch.part != OUTBOUND:
            raise RuntimeError("the trace has no call of `Scheduler.add`, or no return of the runner's `collect`")
        time.sleep(_PAUSE_S)


def _chat(served: Served) -> None:
    """Send a streamed chat, and read its answer to the end."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": 1, "stream": True}
    served.http.post(f"{served.url}/v1/chat/completions", json=body).raise_for_status()


def _show(figures: dict[str, Any], before: dict[str, Any] | None = None) -> None:
    for name, meaning in _PARTS.items():
        count = figures[name]["count"]
        ratio = f", {count / before[name]['count']:.2f} of those at {before['commit'][:7]}" if before else ""
        print(f"{name}, from {meaning}: {count} files at {figures['commit'][:7]}{ratio}")
        print("".join(f"  {file}\n" for file in figures[name]["files"]))


def main() -> None:
    """Measure this code, and that of `--checkout`; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", help="directory of other code to measure too; without it, its last figures stay")
    parser.add_argument("--only-print", action="store_true", help="print the lists, and write no file")
    options = parser.parse_args()
    record, before = RESULTS / f"{NAME}.json", None
    if options.checkout:
        before = measure(Path(options.checkout).resolve())
        _show(before)
    elif record.exists():
        before = json.loads(record.read_text())["of_checkout"]
    figures = measure(ROOT)
    _show(figures, before)
    if not options.only_print:
        print(write(NAME, {**figures, "of_checkout": before}))


if __name__ == "__main__":
    main()
