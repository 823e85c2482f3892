"""Progress of a step that takes long, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def spinner(console: Console) -> Progress:
    """Return a display of one running task with its time; nothing of it stays when it stops.

    It leaves `sys.stdout` and `sys.stderr` alone: what this process prints may go elsewhere than to `console`.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` and the time that has passed on stderr until the block ends, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with spinner(console) as shown:
        shown.add_task(text, total=None)
        yield
