"""Offered load in a process of its own, waited for or run beside other work."""

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
    """Result of a load."""

    summary: dict[str, Any]
    rows: list[Row]
    started_unix_s: float

    @property
    def is_void(self) -> bool:
        """True if too many sends of the generator were late."""
        return bool(self.summary["is_void"])

    @property
    def num_failed(self) -> int:
        """Number of requests that did not end whole."""
        return sum(row.outcome is not Outcome.OK for row in self.rows)

    def of(self, stream: str) -> list[Row]:
        """Return one stream's requests."""
        return [row for row in self.rows if row.stream == stream]


class RunningLoad:
    """A load being offered; call `wait` exactly once."""

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
