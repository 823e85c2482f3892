"""Notifications about batches within one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from replicas.protocol import Band
from serve_app.jobs.api.records import NewBatch
from serve_app.wakeup import Wakeup


class BatchEvents:
    """Events of batches, passed to the loops and the requests of this process that wait for them.

    They only save time: each loop also looks into the database by itself, where other processes may have written.
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
        """Have a new batch validated or, if it brings its lines with it, run."""
        if batch.input_file_id is not None:
            self.to_validate.set()
        else:
            # One with a deadline may run in a more urgent band than its own.
            self._on_lines(Band if batch.window_s is not None else (batch.band,))

    def validated(self, batch_id: str) -> None:
        """Have the lines of a batch run, unless validation ended it."""
        self.ended(batch_id)
        self._on_lines(Band)

    def closing(self, batch_id: str) -> None:
        """Stop the lines of a cancelled or expired batch, and have it finalized."""
        self._on_closing([batch_id])
        self.to_close.set()

    def released(self) -> None:
        """Have everything taken up that a dead process held."""
        self._on_lines(Band)
        self.to_validate.set()
        self.to_close.set()

    def ended(self, batch_id: str) -> None:
        """Wake all requests that wait for the end of a batch."""
        for wakeup in self._waiting.get(batch_id, ()):
            wakeup.set()

    @contextmanager
    def watch(self, batch_id: str) -> Iterator[Wakeup]:
        """Give a wake-up that is set when the batch ends from now on."""
        wakeup = Wakeup()
        self._waiting.setdefault(batch_id, set()).add(wakeup)
        try:
            yield wakeup
        finally:
            wakeups = self._waiting[batch_id]
            wakeups.discard(wakeup)
            if not wakeups:
                del self._waiting[batch_id]
