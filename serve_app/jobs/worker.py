"""Runs the lines of batches on the slots that urgent work leaves free."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from replicas.protocol import Band
from serve_app.jobs.lease_plan import plan, raised_band
from serve_app.jobs.line_queue import LineQueue
from serve_app.jobs.line_runner import LineRunner, Phase, Run, backlog_of
from serve_app.jobs.ownership import Ownership
from serve_app.jobs.results import ResultWriter
from serve_app.jobs.room import Room
from serve_app.wakeup import Wakeup

_LOOK_S = 0.25
"""Between two looks at the replicas without any news."""
_GATHER_S = 0.01
"""News within it is looked at together; clients that submit are answered first."""


class Worker:
    """Tasks that run leased lines, as many as there is room for.

    Invariant: a line that is leased by this process runs in exactly one task, or its result waits to be written, or
    it is being given back.
    """

    def __init__(
        self, queue: LineQueue, ownership: Ownership, runner: LineRunner, room: Room, results: ResultWriter
    ) -> None:
        self._queue = queue
        self._ownership = ownership
        self._runner = runner
        self._room = room
        self._results = results
        self._wakeup = Wakeup()
        self._runs: dict[asyncio.Task[None], Run] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._results.run())
            tasks.create_task(self._fill_slots())

    def has_news(self, bands: Iterable[Band] = Band) -> None:
        """Look for new lines of these bands."""
        self._queue.changed_bands.update(bands)
        self._wakeup.set()

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
        await self._queue.release([run.line for run in runs.values()])

    async def _fill_slots(self) -> None:
        while True:
            if self._queue.is_look_due(self._has_room_for_news()):
                self.abandon(await self._queue.look({run.batch.id for run in self._runs.values()}))
            await self._fill()
            await self._wakeup.wait(self._queue.min_period_s if self._has_room_for_news() else _LOOK_S)
            if self._has_room_for_news():
                await asyncio.sleep(_GATHER_S)

    def _has_room_for_news(self) -> bool:
        """Whether lines might be leased that the queue has not seen yet."""
        return any(self._room_for(band) > 0 for band in self._queue.changed_bands)

    async def _fill(self) -> None:
        runs = self._runs.values()
        self._queue.backlog.not_sent = backlog_of(run for run in runs if run.phase is not Phase.SENT)
        late_before = self._queue.late_before(backlog_of(runs))
        self._raise_late_runs(late_before)
        wanted = plan(self._queue.open_batches, late_before, self._room_for, self._num_running())
        for want, lines in await self._queue.lease(wanted) if wanted else ():
            for line in lines:
                self._start(Run(line, want.batch, want.band))

    def _raise_late_runs(self, late_before: float) -> None:
        """Begin lines of late batches again in the band in which new ones run: in the old one they might never end."""
        for task, run in list(self._runs.items()):
            band = raised_band(run.batch, late_before)
            if band < run.band and not task.cancelling():
                task.cancel()
                self._start(Run(run.line, run.batch, band))

    def _room_for(self, band: Band) -> int:
        num_not_sent = sum(run.phase is not Phase.SENT and run.band <= band for run in self._runs.values())
        room = self._room.for_band(band, num_not_sent)
        return room if room >= self._room.least(band) else 0

    def _num_running(self) -> Counter[tuple[str, Band]]:
        return Counter((run.batch.tenant, run.band) for run in self._runs.values())

    def _start(self, run: Run) -> None:
        task = asyncio.create_task(self._run_line(run, self._ownership.id))
        self._runs[task] = run
        task.add_done_callback(self._ended)

    async def _run_line(self, run: Run, owner: str) -> None:
        result = await self._runner.run(run)
        if owner == self._ownership.id:
            self._results.add(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._runs[task]
        self._wakeup.set()
