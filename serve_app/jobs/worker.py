"""Works off the lines of batches on the slots that urgent work leaves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable

from sqlalchemy import Connection

from replicas.protocol import Band
from serve_app.jobs.backlog import BacklogView
from serve_app.jobs.database import Database
from serve_app.jobs.lease_plan import Wanted, plan, raised_band
from serve_app.jobs.lease_rows import EndedLines, LeasedLine, lease_lines, release_lines
from serve_app.jobs.line_runner import LineRunner, Phase, Run, backlog_of
from serve_app.jobs.ownership import Ownership
from serve_app.jobs.queue_rows import Backlog, OpenBatch, backlog, open_batches, still_in_progress
from serve_app.jobs.results import ResultWriter
from serve_app.jobs.room import Room
from serve_app.jobs.settings import JobsSettings
from serve_app.jobs.signal import Signal

_LOOK_S = 0.25
_REFRESH_S = 3.0
"""Between two looks into the database, however little room there is and however little is new."""
_GATHER_S = 0.01
"""What is new within it is looked at together, and whoever submitted it is answered before."""
_REST_SHARE = 5.0
"""So many times as long as a look into the database took, there is no other one."""
_BATCHES_PER_TENANT = 64
"""Of each band; the database is asked for more when all their lines are taken."""


class Worker:
    """Leases lines, runs them, and hands their results to be written.

    Invariant: a line that is leased by this process runs in exactly one task, or its result waits to be written, or
    it is being given back.
    """

    def __init__(
        self,
        database: Database,
        ownership: Ownership,
        settings: JobsSettings,
        runner: LineRunner,
        room: Room,
        backlog: BacklogView,
        on_written: Callable[[EndedLines], None],
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._ownership = ownership
        self._settings = settings
        self._runner = runner
        self._room = room
        self._backlog = backlog
        self._pace = backlog.pace
        self._on_written = on_written
        self._clock = clock
        self._unix_clock = unix_clock
        self._results = ResultWriter(database, ownership, self._written, unix_clock)
        self._news = Signal()
        self._runs: dict[asyncio.Task[None], Run] = {}
        self._open: list[OpenBatch] = []
        self._news_of = set(Band)
        """Bands of which the database may know batches that are not in `_open`."""
        self._refreshed_s = float("-inf")
        self._least_period_s = 0.0
        """Between two looks: looking must not become what this process does."""

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._results.run())
            tasks.create_task(self._fill_slots())

    def has_news(self, bands: Iterable[Band] = Band) -> None:
        """There are lines of these bands that were not there before."""
        self._news_of.update(bands)
        self._news.set()

    def abandon(self, batch_ids: Iterable[str] | None = None) -> None:
        """Stop running the lines of these batches, or all; somebody else ends them."""
        gone = None if batch_ids is None else set(batch_ids)
        for task, run in self._runs.items():
            if gone is None or run.batch.id in gone:
                task.cancel()

    async def stop(self) -> None:
        """Stop all that runs, write what has come of it, and give the rest back."""
        runs = dict(self._runs)
        self.abandon()
        await asyncio.gather(*runs, return_exceptions=True)
        await self._results.flush()
        owner, held = self._ownership.id, [run.line for run in runs.values()]
        await self._database.write(lambda connection: release_lines(connection, owner, held))

    async def _fill_slots(self) -> None:
        while True:
            age_s = self._clock() - self._refreshed_s
            if age_s >= (self._least_period_s if self._has_room_for_news() else _REFRESH_S):
                await self._refresh()
            await self._fill()
            await self._news.wait(self._least_period_s if self._has_room_for_news() else _LOOK_S)
            if self._has_room_for_news():
                await asyncio.sleep(_GATHER_S)

    def _has_room_for_news(self) -> bool:
        """Whether a look into the database, which takes the longer the more waits, may lead to anything."""
        return any(self._room_for(band) > 0 for band in self._news_of)

    async def _refresh(self) -> None:
        """Look into the database anew: which batches wait, how much, and which of ours are not to be run any more."""
        self._refreshed_s = self._clock()
        self._news_of.clear()
        model, running = self._settings.model_name, {run.batch.id for run in self._runs.values()}

        def look(connection: Connection) -> tuple[list[OpenBatch], list[Backlog], set[str]]:
            waiting = open_batches(connection, model, _BATCHES_PER_TENANT)
            return waiting, backlog(connection, model), still_in_progress(connection, running)

        self._open, waiting, in_progress = await self._database.read(look)
        self._least_period_s = min(_REFRESH_S, _REST_SHARE * (self._clock() - self._refreshed_s))
        self._backlog.waiting = waiting
        self._pace.forget_all_but(running.union(batch.id for batch in self._open))
        self.abandon(running - in_progress)

    async def _fill(self) -> None:
        runs = self._runs.values()
        self._backlog.not_sent = backlog_of(run for run in runs if run.phase is not Phase.SENT)
        undone = (*self._backlog.waiting, *backlog_of(runs))
        late_before = self._pace.late_before(undone, self._unix_clock())
        self._raise_late_runs(late_before)
        wanted = plan(self._open, late_before, self._room_for, self._num_running())
        if wanted:
            await self._lease(wanted)

    def _raise_late_runs(self, late_before: float) -> None:
        """Begin lines of late batches again in the band in which new ones run: in the old one they might never end."""
        for task, run in list(self._runs.items()):
            band = raised_band(run.batch, late_before)
            if band < run.band and not task.cancelling():
                task.cancel()
                self._start(Run(run.line, run.batch, band), self._ownership.id)

    def _room_for(self, band: Band) -> int:
        room = self._room.for_band(band, self._runs.values())
        return room if room >= self._room.least(band) else 0

    def _num_running(self) -> Counter[tuple[str, Band]]:
        return Counter((run.batch.tenant, run.band) for run in self._runs.values())

    async def _lease(self, wanted: list[Wanted]) -> None:
        owner = self._ownership.id

        def lease(connection: Connection) -> list[list[LeasedLine]]:
            # In the order in which everybody locks batches.
            by_id = {want.batch.id: want for want in wanted}
            leased = {
                batch_id: lease_lines(connection, owner, batch_id, by_id[batch_id].num_lines)
                for batch_id in sorted(by_id)
            }
            return [leased[want.batch.id] for want in wanted]

        leased = await self._database.write(lease)
        if owner != self._ownership.id:
            return  # found dead meanwhile: they are others'
        for want, lines in zip(wanted, leased, strict=True):
            # Fewer than asked for: others took them, or the batch is closing.
            want.batch.num_queued = want.batch.num_queued - len(lines) if len(lines) == want.num_lines else 0
            for line in lines:
                self._start(Run(line, want.batch, want.band), owner)
        if not any(batch.num_queued for batch in self._open):
            self._news_of.update(Band)

    def _start(self, run: Run, owner: str) -> None:
        self._pace.began(run.batch.id)
        task = asyncio.create_task(self._run_line(run, owner))
        self._runs[task] = run
        task.add_done_callback(self._ended)

    async def _run_line(self, run: Run, owner: str) -> None:
        result = await self._runner.run(run)
        if owner == self._ownership.id:
            self._results.add(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._runs[task]
        self._news.set()

    def _written(self, ended: EndedLines) -> None:
        self._pace.ended(ended.counted)
        self._on_written(ended)
