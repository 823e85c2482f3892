"""Progress of steps that take long, on a terminal; elsewhere a line for each step that has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def spinner(console: Console) -> Progress:
    """Return a display of one running task with its time; nothing of it stays when it stops."""
    return _display(console, SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())


def _display(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a display of tasks that leaves `sys.stdout` and `sys.stderr` alone.

    What this process prints may go elsewhere than to `console`.
    """
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` and the time that has passed on stderr until the block ends, if that is a terminal.

    The function that it gives shows another text.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with spinner(console) as shown:
        task = shown.add_task(text, total=None)
        yield lambda text: shown.update(task, description=text)


class Transfers:
    """Display of files that are fetched: bytes done and of how many, bytes per second, time left."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._display = _display(console, *columns) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._sizes: Mapping[str, int | None] = {}

    def __enter__(self) -> Self:
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def begin(self, sizes: Mapping[str, int | None]) -> None:
        """Show the files, by name with their sizes in bytes; None: unknown."""
        self._sizes = sizes
        if self._display is not None:
            self._tasks = {name: self._display.add_task(name, total=size) for name, size in sizes.items()}

    def show(self, name: str, num_bytes: int) -> None:
        """Show how many bytes of a file are there."""
        if self._display is not None:
            self._display.update(self._tasks[name], completed=num_bytes)

    def end(self, name: str, outcome: str) -> None:
        """Mark a file as done."""
        size = self._sizes[name]
        if self._display is not None:
            self._display.update(self._tasks[name], completed=size or 0)
        else:
            text = "" if size is None else f" ({decimal(size)})"
            print(f"{name}{text}: {outcome}", file=sys.stderr, flush=True)
