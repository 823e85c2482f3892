"""Session of `headway bench`: all levels with their progress, then the table, the files and the plot."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from serve_app.benchmark.figures import Figures, figures_of
from serve_app.benchmark.levels import Extent, Level, LevelRun
from serve_app.benchmark.plot import plot_over_levels, plot_over_time
from serve_app.benchmark.rows import Targets, write_rows
from serve_app.benchmark.run import Server, probed
from serve_app.benchmark.table import tables, warnings
from serve_app.benchmark.workload import Workload

_PROGRESS_PERIOD_S = 0.25
_SECRET = "--api-key"
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files that a session writes; None: not wanted."""

    figures: Path | None = None
    rows: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a session does."""

    server: Server
    workload: Workload
    levels: Sequence[Level]
    extent: Extent
    targets: Targets
    files: Files


class Session:
    """Session of one plan; `runs` has the levels that have begun."""

    def __init__(self, plan: Plan, output: Console, progress: Console) -> None:
        self._plan = plan
        self._workload = plan.workload
        self._output, self._progress = output, progress
        self._is_interrupted = False
        self.runs: list[LevelRun] = []

    def run(self) -> int:
        """Run all levels, print and write the results, and return the exit code.

        Raises:
            ServerRefused: the server's answer to the first request is an error.
        """
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:  # asyncio has cancelled the level first, which has cut its requests off
            self._is_interrupted = True
        figures = [figures_of(run.rows, self._plan.targets) for run in self.runs]
        self._output.print(self._title, markup=False)
        self._output.print(tables(self.runs, figures))
        for run, level in zip(self.runs, figures, strict=True):
            for warning in warnings(run, level):
                self._progress.print(f"warning: {warning}", markup=False)
        self._write(figures)
        if self._is_interrupted:
            return INTERRUPTED
        return 0 if any(level.num_ok for level in figures) else 1

    async def _run(self) -> None:
        plan = self._plan
        benchmark = await probed(plan.server, plan.workload, random.Random())  # seeded by the system
        self._workload = benchmark.workload
        with _bar(self._progress) as bar:
            for level in plan.levels:
                run = LevelRun(level.name)
                self.runs.append(run)
                async with _shown(bar, run):
                    await benchmark.run(level, plan.extent, run)

    @property
    def _title(self) -> str:
        return f"{self._plan.workload.model} at {self._plan.server.url}"

    def _write(self, figures: Sequence[Figures]) -> None:
        plan = self._plan
        if plan.files.rows is not None:
            write_rows(plan.files.rows, (row for run in self.runs for row in run.rows if row.sent_s is not None))
        if plan.files.figures is not None:
            plan.files.figures.write_text(json.dumps(self._report(figures), indent=2) + "\n")
        if plan.files.plot is None or not self.runs:
            return
        if len(self.runs) == 1:
            plot_over_time(plan.files.plot, self.runs[0].rows, plan.targets, f"{self._title}, {self.runs[0].name}")
        else:
            plot_over_levels(plan.files.plot, self.runs, figures, self._title)

    def _report(self, figures: Sequence[Figures]) -> dict[str, Any]:
        plan, workload = self._plan, self._workload
        return {
            "command": shown_command(sys.orig_argv),
            "version": version("headway-serve"),
            "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "url": plan.server.url,
            "is_interrupted": self._is_interrupted,
            "workload": {
                **asdict(workload),
                "endpoint": workload.endpoint.value,
                "bands": {band.name.lower(): share for band, share in workload.bands.items()},
            },
            "has_retries": plan.server.has_retries,
            "extent": asdict(plan.extent),
            "targets": asdict(plan.targets),
            "levels": [
                {
                    "level": run.name,
                    "started_unix_s": run.started_unix_s,
                    "generator_cpu_share": run.cpu_share,
                    **level.as_json(),
                }
                for run, level in zip(self.runs, figures, strict=True)
            ],
        }


def shown_command(arguments: Sequence[str]) -> str:
    """Return the command without the path of the interpreter and without the API key."""
    shown = ["python", *arguments[1:]]
    for index, argument in enumerate(shown):
        if argument.startswith(f"{_SECRET}="):
            shown[index] = f"{_SECRET}=..."
        elif index and shown[index - 1] == _SECRET:
            shown[index] = "..."
    return " ".join(shown)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
    )


@asynccontextmanager
async def _shown(bar: Progress, run: LevelRun) -> AsyncIterator[None]:
    """Show a level's progress on a terminal while it runs."""
    if not bar.console.is_terminal:
        yield
        return
    task_id = bar.add_task(run.name, total=None, remark="")
    task = asyncio.create_task(_show(bar, task_id, run))
    try:
        yield
    finally:
        task.cancel()
        _update(bar, task_id, run)


async def _show(bar: Progress, task_id: TaskID, run: LevelRun) -> None:
    while True:
        _update(bar, task_id, run)
        await asyncio.sleep(_PROGRESS_PERIOD_S)


def _update(bar: Progress, task_id: TaskID, run: LevelRun) -> None:
    started = [row for row in run.rows if row.sent_s is not None]
    num_done = sum(row.end_s is not None for row in started)
    num_tokens = sum(row.num_tokens for row in started)
    num_failed = sum(row.error_code is not None for row in started)
    seconds = max((row.end_s or row.sent_s or 0.0 for row in started), default=0.0)
    remark = f"{len(started) - num_done} open, {num_tokens / seconds:,.0f} tokens/s" if seconds else ""
    failed = f", {num_failed} failed" if num_failed else ""
    bar.update(task_id, completed=num_done, total=run.num_expected, remark=remark + failed)
    bar.refresh()
