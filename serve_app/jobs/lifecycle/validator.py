"""Validation of batches: read the input file and insert its lines, or fail the batch with the file's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

from sqlalchemy import Connection

from serve_app.jobs.api.errors import UnknownFile
from serve_app.jobs.api.new_lines import NewLine
from serve_app.jobs.api.records import BatchError, BatchStatus
from serve_app.jobs.lifecycle.input_file import InvalidFile, LineChecker, RawLine, split_lines
from serve_app.jobs.lifecycle.line_size import sized
from serve_app.jobs.storage.batch_states import begin_batch, fail_batch, still_owns
from serve_app.jobs.storage.lines import (
    LineRow,
    add_lines,
    delete_lines,
    new_rows,
    refresh_statistics,
    taken_custom_ids,
)
from serve_app.jobs.storage.rows.batches import BatchRow, num_unfinished_lines
from serve_app.jobs.storage.schema.database import Database, JobsContext

CHUNK_LINES = 100
"""Most lines of one write transaction, which takes some milliseconds while other writes wait."""
MAX_ERRORS = 50
"""Most errors reported for one file; reading stops there."""


class OwnershipLost(Exception):
    """Error for a batch that no longer belongs to this process.

    It was cancelled, it expired, or this process was declared dead.
    """


@dataclass(slots=True)
class _ValidationResult:
    num_lines: int = 0
    expected_tokens: int = 0
    errors: list[BatchError] = field(default_factory=list)

    def add(self, error: BatchError) -> None:
        """Add the error of one line.

        Raises:
            InvalidFile: it is the last error that is reported.
        """
        if len(self.errors) == MAX_ERRORS - 1:
            raise InvalidFile(error)
        self.errors.append(error)


class Validator:
    """Validator of whole files, a chunk at a time, in memory that does not grow with the file."""

    def __init__(self, context: JobsContext) -> None:
        self._context = context
        self._settings = context.settings

    async def validate(self, batch: BatchRow, owner: str) -> None:
        """Validate a batch of the owner, and move it to in progress or failed.

        Raises:
            OwnershipLost: it no longer belongs to the owner.
            OSError: the file store failed; the batch is still being validated.
        """
        database = self._context.database
        # Lines of an interrupted validation.
        await delete_own_lines(database, batch.id, owner, BatchStatus.VALIDATING)
        result = _ValidationResult()
        try:
            await self._read(batch, owner, result)
            if not result.errors:
                await self._check_number(batch.tenant, result.num_lines)
        except InvalidFile as invalid:
            result.errors.append(invalid.error)
        except UnknownFile:
            message = f"The bytes of file `{batch.input_file_id}` are gone."
            result.errors.append(BatchError("file_not_found", message, "input_file_id"))
        if result.errors:
            await delete_own_lines(database, batch.id, owner, BatchStatus.VALIDATING)
        if not await database.write(lambda connection: self._conclude(connection, batch.id, owner, result)):
            raise OwnershipLost(batch.id)

    def _conclude(self, connection: Connection, batch_id: str, owner: str, result: _ValidationResult) -> bool:
        now = self._context.clock.unix()
        if result.errors:
            return fail_batch(connection, batch_id, owner, tuple(result.errors), now)
        refresh_statistics(connection, result.num_lines)
        return begin_batch(connection, batch_id, owner, result.num_lines, result.expected_tokens, now)

    async def _read(self, batch: BatchRow, owner: str, result: _ValidationResult) -> None:
        checker = LineChecker(batch.endpoint, self._settings.model_names)
        parts = self._bounded(self._context.files.read(batch.input_file_id))
        async with aclosing(split_lines(parts, self._settings.max_line_bytes)) as chunks:
            async for raw_lines in chunks:
                remaining = iter(raw_lines)
                while some := list(islice(remaining, CHUNK_LINES)):
                    await self._take(batch, owner, checker, some, result)

    async def _bounded(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > self._settings.max_file_bytes:
                message = f"The file has more than {self._settings.max_file_bytes} bytes, the most that is accepted."
                raise InvalidFile(BatchError("file_too_large", message, "input_file_id"))
            yield part

    async def _take(
        self, batch: BatchRow, owner: str, checker: LineChecker, raw_lines: Sequence[RawLine], result: _ValidationResult
    ) -> None:
        """Check some lines and insert the valid ones.

        They are inserted even after an error, because duplicates are found by looking up earlier lines.
        """
        checked = await asyncio.to_thread(_check, checker, raw_lines)
        start = result.num_lines
        numbered = []
        for raw, line in zip(raw_lines, checked, strict=True):
            if isinstance(line, BatchError):
                result.add(line)
                continue
            numbered.append((raw.number, line))
            result.num_lines += 1
            if result.num_lines > self._settings.max_batch_lines:
                message = f"The file has more than {self._settings.max_batch_lines} lines, the most that is accepted."
                raise InvalidFile(BatchError("too_many_lines", message, line=raw.number))
        rows = await asyncio.to_thread(new_rows, batch.id, sized(batch.endpoint, (line for _, line in numbered)), start)
        for taken in await self._context.database.write(lambda connection: _keep(connection, batch.id, owner, rows)):
            number, line = numbered[taken - start]
            message = f"The custom_id `{line.custom_id[:64]}` is used in an earlier line; it must be unique."
            result.add(BatchError("duplicate_custom_id", message, "custom_id", number))
        result.expected_tokens += sum(row["expected_tokens"] for row in rows)

    async def _check_number(self, tenant: str, num_lines: int) -> None:
        """Refuse a file without lines, or with more than its tenant may have unfinished; only now it is known."""
        if not num_lines:
            raise InvalidFile(BatchError("empty_file", "The file has no lines.", "input_file_id"))
        others = await self._context.database.read(lambda connection: num_unfinished_lines(connection, tenant))
        limit = self._settings.max_unfinished_lines
        if others + num_lines > limit:
            message = (
                f"The file has {num_lines} lines, and {others} requests of other batches are still to be "
                f"done; the limit is {limit}. Submit it again when there are fewer."
            )
            raise InvalidFile(BatchError("max_lines_per_tenant", message, "input_file_id"))


async def delete_own_lines(database: Database, batch_id: str, owner: str, status: BatchStatus) -> None:
    """Delete the lines of a batch that has this owner and status, a chunk at a time.

    Raises:
        OwnershipLost: it no longer has this owner and status.
    """

    def delete_some(connection: Connection) -> int:
        _check_ownership(connection, batch_id, owner, status)
        return delete_lines(connection, batch_id, CHUNK_LINES)

    while await database.write(delete_some):
        pass


def _check_ownership(connection: Connection, batch_id: str, owner: str, status: BatchStatus) -> None:
    if not still_owns(connection, batch_id, owner, status):
        raise OwnershipLost(batch_id)


def _check(checker: LineChecker, raw_lines: Sequence[RawLine]) -> list[NewLine | BatchError]:
    return [checker.check(raw.data, raw.number) for raw in raw_lines]


def _keep(connection: Connection, batch_id: str, owner: str, rows: Sequence[LineRow]) -> list[int]:
    """Insert the rows whose custom ids are new, and return the positions of the others."""
    _check_ownership(connection, batch_id, owner, BatchStatus.VALIDATING)
    seen = taken_custom_ids(connection, batch_id, [row["custom_id"] for row in rows])
    fresh, taken = [], []
    for row in rows:
        if row["custom_id"] in seen:
            taken.append(row["position"])
        else:
            fresh.append(row)
            seen.add(row["custom_id"])
    add_lines(connection, fresh)
    return taken
