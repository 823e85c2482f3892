"""Writer of results, with several in one transaction when they come faster than commits (group commit)."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.jobs.storage.context import JobsContext
from serve_app.jobs.storage.leases import EndedLines, LineResult, end_lines
from serve_app.jobs.storage.ownership import Ownership
from serve_app.wakeup import Wakeup

_MAX_AT_ONCE = 100
_POLL_PERIOD_S = 1.0


class ResultWriter:
    """Buffer of results, written soon and in groups. A line whose result is lost before the commit runs again."""

    def __init__(
        self,
        context: JobsContext,
        ownership: Ownership,
        on_written: Callable[[EndedLines], None],
    ) -> None:
        """`on_written`: called after each commit with its outcome."""
        self._context = context
        self._ownership = ownership
        self._on_written = on_written
        self._pending: list[LineResult] = []
        self._wakeup = Wakeup()

    def add(self, result: LineResult) -> None:
        """Buffer a result, to be written soon."""
        self._pending.append(result)
        self._wakeup.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wakeup.wait(_POLL_PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Write all buffered results."""
        while self._pending:
            results, self._pending = self._pending[:_MAX_AT_ONCE], self._pending[_MAX_AT_ONCE:]
            self._on_written(await self._write(results))

    async def _write(self, results: list[LineResult]) -> EndedLines:
        owner, now = self._ownership.id, self._context.clock.unix()
        return await self._context.database.write(lambda connection: end_lines(connection, owner, results, now))
