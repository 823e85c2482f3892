"""Notifications of batch events within one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from replicas.protocol import Band
from serve_app.jobs.api.records import NewBatch
from serve_app.wakeup import Wakeup


class BatchEvents:
    """Batch events, passed to the waiting loops and requests of this process.

    Events only save time: each waiter also polls the database, because other processes write there too.
    """

    def __init__(self, on_lines: Callable[[Iterable[Band]], None], on_closing: Callable[[Iterable[str]], None]) -> None:
        """`on_lines`: called with the bands of new lines; `on_closing`: with ids of batches whose lines must stop."""
        self.to_validate = Wakeup()
        """Set when a batch of a file waits to be validated."""
        self.to_close = Wakeup()
        """Set when a batch waits to be finalized."""
        self._on_lines = on_lines
        self._on_closing = on_closing
        self._waiting: dict[str, set[Wakeup]] = {}

    def submitted(self, batch: NewBatch) -> None:
        """Wake the loop that validates a new batch or, if the batch came with its lines, the worker."""
        if batch.input_file_id is not None:
            self.to_validate.set()
        else:
            # A batch with a deadline may run in a more urgent band than its own.
            self._on_lines(Band if batch.window_s is not None else (batch.band,))

    def validated(self, batch_id: str) -> None:
        """Wake the worker for a validated batch, and the requests that wait for it: it may have failed."""
        self.ended(batch_id)
        self._on_lines(Band)

    def closing(self, batch_id: str) -> None:
        """Stop the lines of a cancelled or expired batch, and wake the loop that finalizes it."""
        self._on_closing([batch_id])
        self.to_close.set()

    def released(self) -> None:
        """Wake all loops to take over the work of a dead process."""
        self._on_lines(Band)
        self.to_validate.set()
        self.to_close.set()

    def ended(self, batch_id: str) -> None:
        """Wake the requests that wait for the end of a batch."""
        for wakeup in self._waiting.get(batch_id, ()):
            wakeup.set()

    @contextmanager
    def watch(self, batch_id: str) -> Iterator[Wakeup]:
        """Give a wake-up that is set when the batch ends, until the context is left."""
        wakeup = Wakeup()
        self._waiting.setdefault(batch_id, set()).add(wakeup)
        try:
            yield wakeup
        finally:
            wakeups = self._waiting[batch_id]
            wakeups.discard(wakeup)
            if not wakeups:
                del self._waiting[batch_id]
