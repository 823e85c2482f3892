"""Takes a closing batch to its end: ends what is left undone, writes the result files, makes it final."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Row

from serve_app.jobs.api.records import BatchKind, BatchStatus, FileRecord, LineStatus
from serve_app.jobs.lifecycle.validator import CHUNK_LINES, OwnershipLost, delete_own_lines
from serve_app.jobs.storage.batch_states import finish_batch
from serve_app.jobs.storage.batches import BatchRow, select_batch
from serve_app.jobs.storage.context import JobsContext
from serve_app.jobs.storage.leases import close_lines, request_id_of
from serve_app.jobs.storage.lines import ended_lines

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
"""What becomes of the lines that a batch with this ending leaves undone."""
_LINE_BREAKS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


class Finalizer:
    """Ends batches. A crash at any point before the last transaction makes the next owner do all of it again.

    That writes the same bytes under the same names: the lines have all ended, and the names were drawn before.
    """

    def __init__(self, context: JobsContext, on_closed: Callable[[LineStatus, int], None]) -> None:
        """`on_closed`: called with the number of lines that were ended undone."""
        self._database = context.database
        self._files = context.files
        self._clock = context.clock
        self._on_closed = on_closed

    async def finalize(self, batch: BatchRow, owner: str) -> None:
        """Bring a closing batch that is the owner's to its end.

        Raises:
            OwnershipLost: it is not the owner's any more.
            OSError: the file store does not answer; the batch is as it was.
        """
        if batch.in_progress_unix_s is None:
            # Of a validation that was cut short.
            await delete_own_lines(self._database, batch.id, owner, BatchStatus(batch.status))
        elif batch.ending in _UNDONE:
            await self._close_lines(batch)
        files = await self._write_files(batch) if batch.kind == BatchKind.FILE.value else []
        now = self._clock.unix()
        if not await self._database.write(lambda connection: finish_batch(connection, batch, owner, files, now)):
            raise OwnershipLost(batch.id)

    async def _close_lines(self, batch: BatchRow) -> None:
        status, error = _UNDONE[batch.ending]
        text = to_json(error).decode()
        while number := await self._database.write(lambda c: close_lines(c, batch, status, text, CHUNK_LINES)):
            self._on_closed(status, number)

    async def _write_files(self, batch: BatchRow) -> list[FileRecord]:
        # The counts of now: lines that were still running when the batch was claimed have ended since.
        batch = await self._database.read(lambda connection: select_batch(connection, batch.id))
        num_others = batch.num_lines - batch.num_completed
        written = [
            await self._write_file(batch, batch.output_file_id, batch.num_completed, is_success=True),
            await self._write_file(batch, batch.error_file_id, num_others, is_success=False),
        ]
        return [one for one in written if one is not None]

    async def _write_file(self, batch: BatchRow, file_id: str, num_lines: int, is_success: bool) -> FileRecord | None:
        """The file of the lines that succeeded, or of all others; None: there are none."""
        if num_lines == 0:
            return None
        num_bytes = await self._files.write(file_id, self._parts(batch.id, num_lines, is_success))
        now = self._clock.unix()
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
        """All lines of one kind.

        Raises:
            OwnershipLost: some are gone, as another process has ended the batch; the rest must not pass for the file.
        """
        after = -1
        while num_lines > 0:
            page = await self._page(batch_id, after, is_success)
            if not page:
                raise OwnershipLost(batch_id)
            yield b"".join(map(result_line, page))
            after = page[-1].position
            num_lines -= len(page)

    async def _page(self, batch_id: str, after: int, is_success: bool) -> list[Row[Any]]:
        return await self._database.read(lambda c: ended_lines(c, batch_id, after, CHUNK_LINES, is_success))


def result_line(line: Row[Any]) -> bytes:
    """A line of an output or error file, as OpenAI writes them.

    JSON leaves some characters as they are at which Python's and httpx's readers of lines would break it.
    """
    text = _result(line)
    for character, escape in _LINE_BREAKS:
        text = text.replace(character, escape)
    return text


def _result(line: Row[Any]) -> bytes:
    request_id = request_id_of(line.batch_id, line.position)
    head = to_json({"id": f"batch_req_{request_id}", "custom_id": line.custom_id})[:-1]
    if line.response is None:
        return b'%s,"response":null,"error":%s}\n' % (head, (line.error or "null").encode())
    answer = to_json({"status_code": line.status_code, "request_id": request_id})[:-1]
    return b'%s,"response":%s,"body":%s},"error":null}\n' % (head, answer, line.response.encode())
