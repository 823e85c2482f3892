"""Sweeper that closes expired batches and deletes old files, lines and batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serve_app.jobs.lifecycle.validator import CHUNK_LINES
from serve_app.jobs.storage.batch_states import batch_with_old_lines, expire_batches, forget_old_lines, late_batches
from serve_app.jobs.storage.lines import delete_lines
from serve_app.jobs.storage.rows.batches import forget_old_batches
from serve_app.jobs.storage.rows.files import bytes_deleted, expire_files, pending_deletion
from serve_app.jobs.storage.rows.responses import expire_responses
from serve_app.jobs.storage.schema.database import JobsContext

logger = logging.getLogger(__name__)

_EXPIRE_PERIOD_S = 3.0
_CLEAN_PERIOD_S = 10.0
_FORGET_PERIOD_S = 600.0
_NUM_AT_ONCE = 20
_RETRY_AFTER_S = 60.0


class Sweeper:
    """Periodic cleanup of the database and the file store.

    After a crash nothing is lost: the next round finds the remaining work again.
    """

    def __init__(self, context: JobsContext, on_expired: Callable[[str], None]) -> None:
        """`on_expired`: called for each batch that begins to close because its deadline has passed."""
        self._context = context
        self._on_expired = on_expired
        self._postponed: dict[str, float] = {}
        """File id -> unix time of the next try, for files that the store failed to delete. Other files come first."""

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(self.expire, _EXPIRE_PERIOD_S))
            tasks.create_task(_repeat(self.clean, _CLEAN_PERIOD_S))
            tasks.create_task(_repeat(self.forget, _FORGET_PERIOD_S))

    async def expire(self) -> None:
        """Begin to close all batches whose deadline has passed."""
        now, model = self._context.clock.unix(), self._context.settings.model_name
        if not await self._context.database.read(lambda c: late_batches(c, model, now)):
            return  # the usual case; a needless write transaction would delay others
        for batch_id in await self._context.database.write(lambda c: expire_batches(c, model, now)):
            self._on_expired(batch_id)

    async def clean(self) -> None:
        """Delete expired files and responses, files without a record, and lines whose results are in files."""
        now = self._context.clock.unix()
        while await self._context.database.write(lambda c: expire_files(c, now, _NUM_AT_ONCE)):
            pass
        while await self._context.database.write(lambda c: expire_responses(c, now, _NUM_AT_ONCE)):
            pass
        await self.delete_pending_files()
        while (batch_id := await self._context.database.read(batch_with_old_lines)) is not None:
            await self._delete_lines(batch_id)

    async def delete_pending_files(self) -> None:
        """Delete the bytes of files without a record. A file that the store fails to delete is retried later."""
        now = self._context.clock.unix()
        self._postponed = {file_id: until for file_id, until in self._postponed.items() if until > now}
        for file_id in await self._context.database.read(
            lambda c: pending_deletion(c, _NUM_AT_ONCE, excluding=self._postponed)
        ):
            try:
                await self._context.files.delete(file_id)
            except Exception:  # each file store has its own errors
                logger.warning("a file could not be deleted yet", exc_info=True, extra={"file_id": file_id})
                self._postponed[file_id] = now + _RETRY_AFTER_S
                continue
            await self._context.database.write(lambda c, file_id=file_id: bytes_deleted(c, file_id))  # type: ignore[misc]

    async def forget(self) -> None:
        """Delete jobs and prompt batches that ended more than `keep_results_s` ago."""
        before = self._context.clock.unix() - self._context.settings.keep_results_s
        while await self._context.database.write(lambda c: forget_old_batches(c, before, _NUM_AT_ONCE)):
            pass

    async def _delete_lines(self, batch_id: str) -> None:
        while await self._context.database.write(lambda c: delete_lines(c, batch_id, CHUNK_LINES)):
            pass
        await self._context.database.write(lambda c: forget_old_lines(c, batch_id))


async def _repeat(work: Callable[[], Awaitable[None]], period_s: float) -> None:
    while True:
        await work()
        await asyncio.sleep(period_s)
