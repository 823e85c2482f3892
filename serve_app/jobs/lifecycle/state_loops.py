"""Loops that validate and close batches, and the events that wake them.

The loops continue from any state found in the database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from replicas.protocol import Band
from serve_app.jobs.api.records import BatchStatus, NewBatch
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.validator import OwnershipLost, Validator
from serve_app.jobs.storage.batch_states import CLOSING, UnclaimedBatches, release_batch
from serve_app.jobs.storage.ownership import Ownership
from serve_app.jobs.storage.rows.batches import BatchRow
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.wakeup import Wakeup

logger = logging.getLogger(__name__)

_NUM_AT_ONCE = 2
"""Loops for validating and for closing: with more than one, a small batch need not wait for a huge one."""
_POLL_PERIOD_S = 5.0
"""Most seconds between two polls. Events wake a loop only for changes by this process; polls find the others."""
_MAX_DELAY_S = 60.0
_FORGET_AFTER_S = 600.0


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


class StateLoop:
    """Loop that claims and processes the batches in some states, one after the other, and waits while there are none.

    A batch that fails, for example because the file store does not answer, is retried with exponential backoff.
    """

    def __init__(
        self,
        context: JobsContext,
        ownership: Ownership,
        statuses: Sequence[BatchStatus],
        process: Callable[[BatchRow, str], Awaitable[None]],
        wakeup: Wakeup,
    ) -> None:
        self._context = context
        self._ownership = ownership
        self._statuses = statuses
        self._process = process
        self._wakeup = wakeup
        self._postponed: dict[str, tuple[float, float]] = {}
        """Batch id -> (earliest monotonic time of the next try, last delay in seconds)."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            if not await self.process_next():
                await self._wakeup.wait(self._idle_s())

    async def process_next(self) -> bool:
        """Claim and process one batch; return False if there was none."""
        owner, database = self._ownership.id, self._context.database
        late = self._late()
        unclaimed = UnclaimedBatches(self._statuses, self._context.settings.model_name, late)
        # Read first: a write transaction takes the database's only write lock.
        if not await database.read(unclaimed.any):
            return False
        batch = await database.write(lambda connection: unclaimed.claim(connection, owner))
        if batch is None:
            return False
        try:
            await self._process(batch, owner)
            self._postponed.pop(batch.id, None)
        except OwnershipLost:
            logger.info("a batch no longer belongs to this process", extra={"batch_id": batch.id})
        except Exception:  # each file store has its own errors, and other batches must go on
            logger.exception("a batch failed and is retried later", extra={"batch_id": batch.id, "state": batch.status})
            self._postpone(batch.id)
            await database.write(lambda connection: release_batch(connection, batch.id, owner))
        return True

    def _late(self) -> list[str]:
        """Return the batches whose next try is in the future; forget those whose last try is long ago."""
        now = self._context.clock.monotonic()
        # Another process may have ended such a batch; if it fails here again, its delays begin anew.
        self._postponed = {
            batch_id: (not_before, delay_s)
            for batch_id, (not_before, delay_s) in self._postponed.items()
            if not_before > now - _FORGET_AFTER_S
        }
        return [batch_id for batch_id, (not_before, _) in self._postponed.items() if not_before > now]

    def _idle_s(self) -> float:
        """Return the seconds until the next poll or the next retry of a postponed batch."""
        now = self._context.clock.monotonic()
        delays = (not_before - now for not_before, _ in self._postponed.values() if not_before > now)
        return min((_POLL_PERIOD_S, *delays))

    def _postpone(self, batch_id: str) -> None:
        _, last_delay_s = self._postponed.get(batch_id, (0.0, 0.5))
        delay_s = min(_MAX_DELAY_S, 2 * last_delay_s)
        self._postponed[batch_id] = (self._context.clock.monotonic() + delay_s, delay_s)


class Lifecycle:
    """Loops that validate batches with an input file, and close batches that are complete, expired or cancelled."""

    def __init__(
        self,
        context: JobsContext,
        ownership: Ownership,
        validator: Validator,
        finalizer: Finalizer,
        events: BatchEvents,
    ) -> None:
        self._validator = validator
        self._finalizer = finalizer
        self._events = events
        self._loops = (
            StateLoop(context, ownership, (BatchStatus.VALIDATING,), self._validate, events.to_validate),
            StateLoop(context, ownership, CLOSING, self._close, events.to_close),
        )

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for loop in self._loops:
                for _ in range(_NUM_AT_ONCE):
                    tasks.create_task(loop.run())

    async def _validate(self, batch: BatchRow, owner: str) -> None:
        try:
            await self._validator.validate(batch, owner)
        finally:
            self._events.validated(batch.id)

    async def _close(self, batch: BatchRow, owner: str) -> None:
        await self._finalizer.finalize(batch, owner)
        self._events.ended(batch.id)
