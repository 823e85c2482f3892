"""Start, stop and memory: `python -m bench.server.start_stop [MODEL]`, beside a bare Serve application.

The bare application has one replica, whose constructor imports torch, on a cluster with Headway's options. It
starts and stops with Ray's and Serve's public functions. The two take turns. A start lasts from the start of the
process to the first answer; a stop lasts from SIGTERM to the end of the process. A start computes most of the time, so
on a busy machine its processor time tells more than its duration. The memory is the sum of all processes' PSS, in
which shared pages count in parts, after `--requests` chats of 16 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
import psutil

from bench.record import write
from testkit.free_port import free_port
from testkit.limits import START_LIMIT_S
from testkit.serving.served import answers, end_processes, wait_for

_IDLE_S = 3.0
_FIGURES = ("start_s", "start_cpu_s", "stop_s", "memory_mb")
_BARE = "bench.server.bare_serve"
_HEADWAY = "serve_app.cli.main"


@dataclass(frozen=True, slots=True)
class Turn:
    """Times of one start and stop, seconds."""

    start_s: float
    stop_s: float
    start_cpu_s: float
    """Processor time of all processes until the first answer."""
    parts: dict[str, float]
    """Time from the start of the process to each line that it printed, by the line."""
    num_left: int
    """Processes that the program left behind."""
    pss_bytes: list[tuple[str, int]]
    """Memory of each process after the requests, by the beginning of its command; the largest is first."""

    @property
    def memory_mb(self) -> float:
        """Memory of all processes, MB."""
        return sum(num_bytes for _, num_bytes in self.pss_bytes) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="model and key=value arguments of `headway serve`")
    parser.add_argument("--requests", type=int, default=100, help="chats before the memory is read")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--name", default="start_stop", help="file in bench/results")
    options = parser.parse_args()
    turns: dict[str, list[Turn]] = {"bare": [], "headway": []}
    for _ in range(options.turns):
        port = free_port("127.0.0.1")
        turns["bare"].append(_turn([_BARE, str(port)], f"http://127.0.0.1:{port}/", 0))
        command = [_HEADWAY, "serve", "--port", str(port), *options.model]
        turns["headway"].append(_turn(command, f"http://127.0.0.1:{port}/health/ready", options.requests))
    for name, each in turns.items():
        _show(name, each)
    figures = {name: [_figures(turn) for turn in each] for name, each in turns.items()}
    print(write(options.name, {"turns": figures, "median": {name: _medians(each) for name, each in turns.items()}}))


def _turn(command: list[str], url: str, num_requests: int) -> Turn:
    with tempfile.TemporaryFile("w+") as output:
        started_s = time.monotonic()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=output, text=True, env=environment
        )
        try:
            parts = _read_until_ready(process, started_s)
            wait_for(lambda: answers(url), "the application answers", START_LIMIT_S, 0.02)
            ready_s = time.monotonic()
            descendants = psutil.Process(process.pid).children(recursive=True)
            cpu_s = sum(_cpu_s(each) for each in (psutil.Process(process.pid), *descendants))
            _chat(url.removesuffix("/health/ready"), num_requests)
            time.sleep(_IDLE_S)
            pss_bytes = sorted(map(_pss, (psutil.Process(process.pid), *descendants)), key=lambda each: -each[1])
            stopping_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(START_LIMIT_S)
            left = [each for each in descendants if each.is_running()]
            stopped_s = time.monotonic()
        except BaseException:
            end_processes([psutil.Process(process.pid)] if process.poll() is None else [])
            output.seek(0)
            print(output.read()[-3000:], file=sys.stderr)
            raise
    end_processes(left)
    return Turn(ready_s - started_s, stopped_s - stopping_s, cpu_s, parts, len(left), pss_bytes)


def _chat(url: str, num_requests: int) -> None:
    """Send chats of a few words, one after the other."""
    with httpx.Client(base_url=url, timeout=START_LIMIT_S, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"] if num_requests else ""
        for number in range(num_requests):
            messages = [{"role": "user", "content": f"Name a river, number {number}."}]
            body = {"model": model, "messages": messages, "max_tokens": 16}
            client.post("/v1/chat/completions", json=body).raise_for_status()


def _pss(process: psutil.Process) -> tuple[str, int]:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:60], int(process.memory_full_info().pss)
    return "ended", 0


def _read_until_ready(process: subprocess.Popen[str], started_s: float) -> dict[str, float]:
    """Return the times of the lines that a program prints until it serves; its last line then begins so."""
    parts: dict[str, float] = {}
    assert process.stdout is not None
    for line in process.stdout:
        parts[line.strip()[:60]] = round(time.monotonic() - started_s, 2)
        if line.startswith("Ctrl-C stops"):
            return parts
    raise RuntimeError(f"the program ended with {process.wait()}")


def _figures(turn: Turn) -> dict[str, object]:
    figures = {name: round(getattr(turn, name), 2) for name in _FIGURES}
    largest = [[name, round(num_bytes / 1e6)] for name, num_bytes in turn.pss_bytes if num_bytes >= 1e7]
    counts = {"num_left": turn.num_left, "num_processes": len(turn.pss_bytes)}
    return {**figures, **counts, "parts": turn.parts, "pss_mb": largest}


def _medians(turns: Iterable[Turn]) -> dict[str, float]:
    each = list(turns)
    return {name: round(statistics.median(getattr(turn, name) for turn in each), 2) for name in _FIGURES}


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def _show(name: str, turns: list[Turn]) -> None:
    for turn in turns:
        start = f"start {turn.start_s:5.1f} s, of processors {turn.start_cpu_s:5.1f} s"
        steps = ", ".join(f"{line} {at:.1f}" for line, at in turn.parts.items() if line.endswith("..."))
        print(
            f"{name:8} {start}  stop {turn.stop_s:5.1f} s  {turn.memory_mb:5,.0f} MB  left {turn.num_left}  ({steps})"
        )


if __name__ == "__main__":
    main()
