"""Queue of lines to run, as one worker sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from replicas.protocol import Band
from serve_app.jobs.execution.planning import LeaseRequest
from serve_app.jobs.execution.throughput import BacklogView
from serve_app.jobs.storage.lines import LeasedLine, lease_lines, release_lines
from serve_app.jobs.storage.ownership import Ownership, Speed, other_workers
from serve_app.jobs.storage.rows import batch_queue
from serve_app.jobs.storage.rows.batch_queue import Backlog, OpenBatch
from serve_app.jobs.storage.schema.database import JobsContext

_REFRESH_S = 3.0
"""Longest time between two polls of the database."""
_REST_FACTOR = 5.0
"""After a poll that took t seconds, the next one starts at least this many times t after its start."""
_BATCHES_PER_TENANT = 64
"""Most batches of a tenant and band that one poll returns."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of one poll."""

    open_batches: list[OpenBatch]
    backlog: list[Backlog]
    in_progress: set[str]
    """Batches among the running ones that are still in progress."""
    others: list[Speed]
    running_elsewhere: Counter[tuple[str, Band]]


def _look(connection: Connection, model: str, owner: str, running: Collection[str]) -> _Found:
    others = other_workers(connection, model, owner)
    return _Found(
        batch_queue.open_batches(connection, model, _BATCHES_PER_TENANT),
        batch_queue.backlog(connection, model),
        batch_queue.still_in_progress(connection, running),
        others,
        batch_queue.running_elsewhere(connection, model, owner) if others else Counter(),
    )


class LineQueue:
    """Queue of lines to run: the open batches found by the last poll of the database, and leases of their lines.

    The database is polled every 3 s, and earlier if it has changed and the change may lead to leases. A poll takes
    longer the more batches wait. Polls that take up to 0.6 s use at most a fifth of the time.

    Workers meet only in the database. What others submit, cancel, hold and achieve is known here at most 3 s later.
    """

    def __init__(self, context: JobsContext, ownership: Ownership, backlog: BacklogView) -> None:
        self._context = context
        self._ownership = ownership
        self.backlog = backlog
        self.open_batches: list[OpenBatch] = []
        self.changed_bands = set(Band)
        """Bands in which the database may have batches that are missing from `open_batches`."""
        self.running_elsewhere: Counter[tuple[str, Band]] = Counter()
        """Expected tokens of the lines that other workers hold, by tenant and band."""
        self.turns: dict[str, int] = {}
        """Number of the last lease of each tenant that has lines waiting, counted up."""
        self._num_leases = 0
        self.min_period_s = 0.0
        """Shortest time between two polls, seconds."""
        self._polled_s = float("-inf")

    def is_poll_due(self, is_useful: bool) -> bool:
        """Return True if the database should be polled now; `is_useful`: a poll may lead to leases."""
        age_s = self._context.clock.monotonic() - self._polled_s
        return age_s >= (self.min_period_s if is_useful else _REFRESH_S)

    async def poll(self, running: Collection[str]) -> set[str]:
        """Read the batches with queued lines and the backlog.

        Return those of the `running` batches that are no longer in progress.
        """
        clock, model = self._context.clock, self._context.settings.model_name
        self._polled_s = clock.monotonic()
        self.changed_bands.clear()

        owner = self._ownership.id
        state = await self._context.database.read(lambda connection: _look(connection, model, owner, running))
        self.open_batches, self.backlog.waiting = state.open_batches, state.backlog
        self.backlog.throughput.others, self.running_elsewhere = state.others, state.running_elsewhere
        self.min_period_s = min(_REFRESH_S, _REST_FACTOR * (clock.monotonic() - self._polled_s))
        tenants = {batch.tenant for batch in self.open_batches}
        self.turns = {tenant: turn for tenant, turn in self.turns.items() if tenant in tenants}
        self.backlog.throughput.retain({*running, *(batch.id for batch in self.open_batches)})
        return set(running) - state.in_progress

    def late_deadline(self, leased: Iterable[Backlog]) -> float:
        """Return a unix time; batches with a deadline up to it are expected to miss it.

        `leased`: work to be counted besides the queued lines in the database.
        """
        return self.backlog.throughput.late_deadline((*self.backlog.waiting, *leased), self._context.clock.unix())

    async def lease(self, requests: Sequence[LeaseRequest]) -> list[tuple[LeaseRequest, list[LeasedLine]]]:
        """Lease lines for this process; return none if it was declared dead during the transaction."""
        owner = self._ownership.id

        num_lines = {request.batch.id: request.num_lines for request in requests}
        leased: dict[str, list[LeasedLine]] = {batch_id: [] for batch_id in num_lines}
        for line in await self._context.database.write(lambda connection: lease_lines(connection, owner, num_lines)):
            leased[line.batch_id].append(line)
        if owner != self._ownership.id:
            return []
        for request in requests:
            num_leased = len(leased[request.batch.id])
            # Fewer lines than requested: other processes have leased the rest, or the batch is closing.
            request.batch.num_queued = request.batch.num_queued - num_leased if num_leased == request.num_lines else 0
            if num_leased:
                self._num_leases += 1
                self.turns[request.batch.tenant] = self._num_leases
                self.backlog.throughput.began(request.batch.id)
        if not any(batch.num_queued for batch in self.open_batches):
            self.changed_bands.update(Band)
        return [(request, leased[request.batch.id]) for request in requests]

    async def release(self, lines: Sequence[LeasedLine]) -> None:
        """Give back leased lines that have not ended."""
        owner = self._ownership.id
        await self._context.database.write(lambda connection: release_lines(connection, owner, lines))
