"""Offered load in a process of its own, waited for or run beside other work, and looks at what it loads."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.load.spec import LoadSpec
from bench.load.summary import VOID_EXIT_CODE
from bench.record import percentile, ratio
from serve_app.benchmark.rows import Outcome, Row, read_rows
from testkit.serving.served import ROOT


@dataclass(frozen=True, slots=True)
class Offered:
    """Result of a load."""

    summary: dict[str, Any]
    """Figures of the generator; `is_void`: too many of its sends were late."""
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
        self._output, self._rows = folder / "result.json", folder / "rows.jsonl"
        spec_file = folder / "spec.json"
        spec_file.write_text(spec.model_dump_json())
        command = [sys.executable, "-m", "bench.load", "--url", url, "--spec", str(spec_file)]
        command += ["--output", str(self._output), "--rows", str(self._rows)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    @property
    def is_running(self) -> bool:
        """True until the generator has ended."""
        return self._process.poll() is None

    def wait(self) -> Offered:
        """Wait for the end of the load and return its result.

        Raises:
            RuntimeError: the generator failed.
        """
        try:
            said, _ = self._process.communicate()
        finally:
            self._process.kill()
        if self._process.returncode not in (0, VOID_EXIT_CODE):
            raise RuntimeError(f"the load generator ended with {self._process.returncode}")
        print(said, flush=True)
        summary = json.loads(self._output.read_text())
        offered = Offered(summary, read_rows(self._rows), summary["started_unix_s"])
        self._folder.cleanup()
        return offered


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
