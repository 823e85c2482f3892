"""Progress bar of a batch on the terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.cli.batch_client import JsonObject


class BatchProgress:
    """Progress bar that is redrawn on every change; without a terminal only its last state is printed."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remark]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("asking", total=None, remark="")

    def __enter__(self) -> BatchProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, batch: JsonObject) -> None:
        """Draw a batch object."""
        counts = batch["request_counts"]
        remarks = [f"{counts['failed']} failed"] if counts["failed"] else []
        if batch.get("eta_seconds") is not None:
            remarks.append(f"about {batch['eta_seconds']:.0f} s left")
        self._progress.update(
            self._task,
            description=batch["status"],
            completed=counts["completed"] + counts["failed"],
            total=counts["total"] or None,
            remark=", ".join(remarks),
        )

    def show_trouble(self, message: str) -> None:
        """Draw the reason why the batch cannot be read."""
        self._progress.update(self._task, remark=message)
