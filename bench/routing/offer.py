"""Offered load in a process of its own, waited for or run beside other work, and looks at what it loads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.record import percentile, ratio
from bench.routing.streams import LoadSpec, make_schedule, write_trace
from serve_app.benchmark.rows import Outcome, Row, read_rows
from testkit.serving.served import ROOT

# A program that runs in the background may have inherited a SIGINT that is ignored.
_COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from serve_app.cli.main import app; app()"
)
_NICEST = -10
_MAX_LATE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Offered:
    """Result of a load."""

    summary: dict[str, Any]
    """Spec, and figures of `headway bench`; `is_void`: too many of its sends were late."""
    rows: list[Row]
    started_unix_s: float

    @property
    def num_failed(self) -> int:
        """Number of requests that did not end whole."""
        return sum(row.outcome is not Outcome.OK for row in self.rows)

    def of(self, stream: str) -> list[Row]:
        """Return one stream's requests."""
        return [row for row in self.rows if row.stream == stream]


class RunningLoad:
    """Load that is being offered; call `wait` exactly once."""

    def __init__(self, url: str, spec: LoadSpec) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hw-load-")
        folder = Path(self._folder.name)
        self._figures, self._rows, trace = folder / "figures.json", folder / "rows.jsonl", folder / "trace.jsonl"
        self._spec, self._schedule = spec, make_schedule(spec)
        write_trace(trace, (each.request for each in self._schedule))
        command = [sys.executable, "-c", _COMMAND, "bench", "--url", url, "--model", spec.model]
        command += ["--endpoint", "completions", "--trace", str(trace), "--timeout", str(spec.timeout_s)]
        command += ["--json", str(self._figures), "--rows", str(self._rows), *["--retries"][: spec.has_retries]]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._scheduling = _put_first(self._process.pid)

    @property
    def is_running(self) -> bool:
        """True until the generator has ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Cut off the requests that are open, and send no more."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> Offered:
        """Wait for the end of the load and return its result.

        Raises:
            RuntimeError: the generator failed.
        """
        try:
            said, _ = self._process.communicate()
        finally:
            self._process.kill()
        print(said, flush=True)
        if not self._figures.exists():
            raise RuntimeError(f"`headway bench` ended with {self._process.returncode}")
        [level] = json.loads(self._figures.read_text())["levels"]
        rows = read_rows(self._rows)
        self._folder.cleanup()
        for row in rows:
            scheduled = self._schedule[row.index]
            row.stream, row.num_output_tokens = scheduled.stream, scheduled.num_output_tokens
        about = {"is_void": is_void(rows, self._spec.late_after_s), "spec": asdict(self._spec)}
        return Offered({**about, "scheduling": self._scheduling, **level}, rows, level["started_unix_s"])


def _put_first(pid: int) -> str:
    """Ask the kernel to prefer the generator: a server on the same cores must not delay the sends.

    Returns the scheduling that was granted.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
        return "real-time"
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICEST)
        return f"nice {_NICEST}"
    return "normal"


def is_void(rows: Sequence[Row], late_after_s: float) -> bool:
    """Return True if more than 1 % of the requests left later than that after their times."""
    return sum(row.lateness_s > late_after_s for row in rows) > _MAX_LATE_SHARE * len(rows)


def offer(url: str, spec: LoadSpec) -> Offered:
    """Offer a load and wait for its end."""
    return RunningLoad(url, spec).wait()


def tokens_computed(rows: Sequence[Row], start_s: float, end_s: float) -> tuple[int, int]:
    """Return prompt and output tokens in [start_s, end_s); a prompt counts when its first token comes."""
    prompt_tokens = sum(row.num_prompt_tokens for row in rows if row.chunk_s and start_s <= row.chunk_s[0] < end_s)
    output_tokens = sum(
        count
        for row in rows
        for at_s, count in zip(row.chunk_s, row.chunk_tokens, strict=True)
        if start_s <= at_s < end_s
    )
    return prompt_tokens, output_tokens


def compare_latencies(beside: Sequence[Row], alone: Sequence[Row]) -> dict[str, Any]:
    """Return latencies of requests beside other work and without it, and their ratios."""
    both = (beside, alone)
    ttft = [_percentile([row.ttft_s for row in rows if row.ttft_s is not None], 99) for rows in both]
    gaps = [[gap for row in rows for gap in row.inter_token_s] for rows in both]
    longest = [_percentile(values, 99) for values in gaps]
    return {
        "ttft_p99_s": ttft,
        "ttft_p99_ratio": ratio(*ttft),
        "gap_p99_s": longest,
        "gap_p99_ratio": ratio(*longest),
        "decode_step_ratio": ratio(*(_percentile(values, 50) for values in gaps)),
    }


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of one look."""

    at_unix_s: float
    """Time at which the look began."""
    value: Any


@dataclass(slots=True)
class Watch:
    """Looks so far; the watching thread appends, others read."""

    seen: list[Seen] = field(default_factory=list)
    num_failed: int = 0


@contextlib.contextmanager
def watching(look: Callable[[], Any], period_s: float) -> Iterator[Watch]:
    """Look every `period_s` within the context; count failed looks and leave them out."""
    watch, stop = Watch(), threading.Event()

    def run() -> None:
        while not stop.wait(period_s):
            at_unix_s = time.time()
            try:
                watch.seen.append(Seen(at_unix_s, look()))
            except (httpx.HTTPError, KeyError, ValueError):
                watch.num_failed += 1

    thread = threading.Thread(target=run, name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
