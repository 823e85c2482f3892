"""Offers a load from a process of its own, now or beside other things."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.rows import Outcome, Row, read_rows
from bench.load.spec import LoadSpec
from bench.serving import ROOT

_HEAD_START_S = 60.0
VOID_EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class Offered:
    """What came of a load."""

    summary: dict[str, Any]
    rows: list[Row]
    started_unix_s: float

    @property
    def is_void(self) -> bool:
        """Whether the generator was too late too often."""
        return bool(self.summary["is_void"])

    @property
    def num_failed(self) -> int:
        """Requests that did not come back whole."""
        return sum(row.outcome is not Outcome.OK for row in self.rows)

    def of(self, stream: str) -> list[Row]:
        """One stream's requests."""
        return [row for row in self.rows if row.stream == stream]


class RunningLoad:
    """A load being offered; `wait` for it exactly once."""

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
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait(self) -> Offered:
        """What came of it.

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
    """Offer a load and wait for all of it."""
    return RunningLoad(url, spec).wait()


def tokens_computed(rows: Sequence[Row], start_s: float, end_s: float) -> tuple[int, int]:
    """Prompt and output tokens that [start_s, end_s) saw: a prompt counts when its first token comes."""
    prompt_tokens = sum(row.num_prompt_tokens for row in rows if row.chunk_s and start_s <= row.chunk_s[0] < end_s)
    output_tokens = sum(
        count
        for row in rows
        for at_s, count in zip(row.chunk_s, row.chunk_tokens, strict=True)
        if start_s <= at_s < end_s
    )
    return prompt_tokens, output_tokens
