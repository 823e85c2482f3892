"""Finalization of closing batches: end unfinished lines, write the result files, make the batch final."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Row

from serve_app.jobs.api.new_lines import on_one_line
from serve_app.jobs.api.records import BatchKind, BatchStatus, FileRecord, LineStatus
from serve_app.jobs.lifecycle.validator import CHUNK_LINES, OwnershipLost, delete_own_lines
from serve_app.jobs.storage.batch_states import finish_batch
from serve_app.jobs.storage.lines import close_lines, ended_lines, request_id_of
from serve_app.jobs.storage.rows.batches import BatchRow, select_batch
from serve_app.jobs.storage.schema.database import JobsContext

_UNDONE = {
    BatchStatus.EXPIRED.value: (
        LineStatus.EXPIRED,
        {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        },
    ),
    BatchStatus.CANCELLED.value: (
        LineStatus.CANCELLED,
        {"code": "batch_cancelled", "message": "The batch was cancelled before this request was executed."},
    ),
}
"""Status and error object of the lines that a batch with this ending leaves unfinished."""


class Finalizer:
    """Writer of result files that makes closing batches final.

    After a crash before the last transaction, the next owner starts over. It writes the same bytes under the same
    ids: all lines have ended, and the file ids were chosen when closing began.
    """

    def __init__(self, context: JobsContext, ended_lines: Counter[LineStatus]) -> None:
        """`ended_lines`: counts the unfinished lines that closing ends, by status."""
        self._context = context
        self._ended_lines = ended_lines

    async def finalize(self, batch: BatchRow, owner: str) -> None:
        """Make a closing batch of the owner final.

        Raises:
            OwnershipLost: it no longer belongs to the owner.
            OSError: the file store failed; the batch is still closing.
        """
        if batch.in_progress_unix_s is None:
            # Lines of an interrupted validation; they were never counted.
            await delete_own_lines(self._context.database, batch.id, owner, BatchStatus(batch.status))
        elif batch.ending in _UNDONE:
            await self._close_lines(batch)
        files = await self._write_files(batch) if batch.kind == BatchKind.FILE.value else []
        now = self._context.clock.unix()
        if not await self._context.database.write(
            lambda connection: finish_batch(connection, batch, owner, files, now)
        ):
            raise OwnershipLost(batch.id)

    async def _close_lines(self, batch: BatchRow) -> None:
        status, error = _UNDONE[batch.ending]
        text = to_json(error).decode()
        while number := await self._context.database.write(lambda c: close_lines(c, batch, status, text, CHUNK_LINES)):
            self._ended_lines[status] += number

    async def _write_files(self, batch: BatchRow) -> list[FileRecord]:
        # Read the counts again: lines that were running when the batch was claimed have ended since.
        batch = await self._context.database.read(lambda connection: select_batch(connection, batch.id))
        written = [
            await self._write_file(batch, batch.output_file_id, batch.num_completed, is_success=True),
            await self._write_file(batch, batch.error_file_id, batch.num_lines - batch.num_completed, is_success=False),
        ]
        return [one for one in written if one is not None]

    async def _write_file(self, batch: BatchRow, file_id: str, num_lines: int, is_success: bool) -> FileRecord | None:
        """Write the file of the lines that succeeded, or of all others; return None if there are no such lines."""
        if num_lines == 0:
            return None
        num_bytes = await self._context.files.write(file_id, self._parts(batch.id, num_lines, is_success))
        now = self._context.clock.unix()
        kept_s = batch.output_expires_after_s
        return FileRecord(
            id=file_id,
            tenant=batch.tenant,
            purpose="batch_output",
            filename=f"{batch.id}_{'output' if is_success else 'error'}.jsonl",
            num_bytes=num_bytes,
            created_unix_s=now,
            expires_unix_s=None if kept_s is None else now + kept_s,
        )

    async def _parts(self, batch_id: str, num_lines: int, is_success: bool) -> AsyncIterator[bytes]:
        """Yield all lines that succeeded, or all others, as parts of a file.

        Raises:
            OwnershipLost: lines are missing, because another process has made the batch final; this stops the
                writing of an incomplete file.
        """
        after = -1
        while num_lines > 0:
            query = partial(ended_lines, batch_id=batch_id, after=after, limit=CHUNK_LINES, is_success=is_success)
            page = await self._context.database.read(query)
            if not page:
                raise OwnershipLost(batch_id)
            yield b"".join(map(result_line, page))
            after = page[-1].position
            num_lines -= len(page)


def result_line(line: Row[Any]) -> bytes:
    """Return a line of an output or error file in OpenAI's format."""
    return on_one_line(_result(line))


def _result(line: Row[Any]) -> bytes:
    request_id = request_id_of(line.batch_id, line.position)
    head = to_json({"id": f"batch_req_{request_id}", "custom_id": line.custom_id})[:-1]
    if line.response is None:
        return b'%s,"response":null,"error":%s}\n' % (head, (line.error or "null").encode())
    answer = to_json({"status_code": line.status_code, "request_id": request_id})[:-1]
    return b'%s,"response":%s,"body":%s},"error":null}\n' % (head, answer, line.response.encode())
