"""Takes a batch from its uploaded file to rows of lines, or says what is wrong with the file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

from sqlalchemy import Connection

from serve_app.jobs.batch_rows import BatchRow, num_unfinished_lines
from serve_app.jobs.batch_states import begin_batch, fail_batch, still_owns
from serve_app.jobs.context import JobsContext
from serve_app.jobs.database import Database
from serve_app.jobs.errors import UnknownFile
from serve_app.jobs.line_checker import LineChecker
from serve_app.jobs.line_rows import LineRow, add_lines, delete_lines, new_row, taken_custom_ids
from serve_app.jobs.line_splitter import LineTooLong, RawLine, split_lines
from serve_app.jobs.records import BatchError, BatchStatus, NewLine

CHUNK_LINES = 100
"""Lines of one transaction: what others wait for, some milliseconds."""
MAX_ERRORS = 50
"""Most errors that are told of one file; behind them it is not read."""


class LostBatch(Exception):
    """The batch is not ours any more: it was cancelled, it expired, or we were found dead."""


class _Stop(Exception):
    """There is no point in reading on; the errors say why."""


@dataclass(slots=True)
class _Findings:
    num_lines: int = 0
    expected_tokens: int = 0
    errors: list[BatchError] = field(default_factory=list)

    def add(self, error: BatchError) -> None:
        self.errors.append(error)
        if len(self.errors) >= MAX_ERRORS:
            raise _Stop


class Validator:
    """Checks whole files, a chunk at a time; what is held does not grow with the file."""

    def __init__(self, context: JobsContext) -> None:
        self._database = context.database
        self._files = context.files
        self._settings = context.settings
        self._clock = context.clock

    async def validate(self, batch: BatchRow, owner: str) -> None:
        """Bring a batch that is being validated, and is the owner's, to its next state.

        Raises:
            LostBatch: it is not the owner's any more.
            OSError: the file store does not answer; the batch is as it was.
        """
        # Those of a validation that did not come to its end.
        await delete_own_lines(self._database, batch.id, owner, BatchStatus.VALIDATING)
        findings = _Findings()
        try:
            await self._read(batch, owner, findings)
        except _Stop:
            pass
        except LineTooLong as error:
            limit = self._settings.max_line_bytes
            message = f"This line has more than {limit} bytes, the most that is accepted."
            findings.errors.append(BatchError("line_too_long", message, line=error.number))
        except UnknownFile:
            message = f"The bytes of file `{batch.input_file_id}` are gone."
            findings.errors.append(BatchError("file_not_found", message, "input_file_id"))
        if not findings.num_lines and not findings.errors:
            findings.errors.append(BatchError("empty_file", "The file has no lines.", "input_file_id"))
        if not findings.errors:
            await self._check_quota(batch.tenant, findings)
        if findings.errors:
            await delete_own_lines(self._database, batch.id, owner, BatchStatus.VALIDATING)
        if not await self._database.write(lambda connection: self._conclude(connection, batch.id, owner, findings)):
            raise LostBatch(batch.id)

    def _conclude(self, connection: Connection, batch_id: str, owner: str, findings: _Findings) -> bool:
        now = self._clock.unix()
        if findings.errors:
            return fail_batch(connection, batch_id, owner, tuple(findings.errors), now)
        return begin_batch(connection, batch_id, owner, findings.num_lines, findings.expected_tokens, now)

    async def _read(self, batch: BatchRow, owner: str, findings: _Findings) -> None:
        checker = LineChecker(batch.endpoint, self._settings.model_name)
        parts = self._bounded(self._files.read(batch.input_file_id), findings)
        async with aclosing(split_lines(parts, self._settings.max_line_bytes)) as chunks:
            async for raw_lines in chunks:
                remaining = iter(raw_lines)
                while some := list(islice(remaining, CHUNK_LINES)):
                    await self._take(batch, owner, checker, some, findings)

    async def _bounded(self, parts: AsyncIterator[bytes], findings: _Findings) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > self._settings.max_file_bytes:
                limit = self._settings.max_file_bytes
                message = f"The file has more than {limit} bytes, the most that is accepted."
                findings.errors.append(BatchError("file_too_large", message, "input_file_id"))
                raise _Stop
            yield part

    async def _take(
        self, batch: BatchRow, owner: str, checker: LineChecker, raw_lines: Sequence[RawLine], findings: _Findings
    ) -> None:
        """Check some lines and keep the good ones, those of a file with bad lines too: duplicates are found so."""
        checked = await asyncio.to_thread(_check, checker, raw_lines)
        start = findings.num_lines
        numbered = []
        for raw, line in zip(raw_lines, checked, strict=True):
            if isinstance(line, BatchError):
                findings.add(line)
                continue
            numbered.append((raw.number, line))
            findings.num_lines += 1
            if findings.num_lines > self._settings.max_batch_lines:
                limit = self._settings.max_batch_lines
                message = f"The file has more than {limit} lines, the most that is accepted."
                findings.errors.append(BatchError("too_many_lines", message, line=raw.number))
                raise _Stop
        rows = await asyncio.to_thread(_rows, batch.id, start, [line for _, line in numbered])
        for taken in await self._database.write(lambda connection: _keep(connection, batch.id, owner, rows)):
            number, line = numbered[taken - start]
            message = f"The custom_id `{line.custom_id[:64]}` stands in an earlier line too; it must be unique."
            findings.add(BatchError("duplicate_custom_id", message, "custom_id", number))
        findings.expected_tokens += sum(row["expected_tokens"] for row in rows)

    async def _check_quota(self, tenant: str, findings: _Findings) -> None:
        """Only now it is known how many lines the file has."""
        others = await self._database.read(lambda connection: num_unfinished_lines(connection, tenant))
        limit = self._settings.max_unfinished_lines
        if others + findings.num_lines > limit:
            message = (
                f"The file has {findings.num_lines} lines, and {others} requests of other batches are still to be "
                f"done; the limit is {limit}. Submit it again when there are fewer."
            )
            findings.errors.append(BatchError("max_lines_per_tenant", message, "input_file_id"))


async def delete_own_lines(database: Database, batch_id: str, owner: str, status: BatchStatus) -> None:
    """Delete the lines of a batch that is the owner's and has this status, a chunk at a time.

    Raises:
        LostBatch: it is not, any more.
    """

    def delete_some(connection: Connection) -> int:
        _must_own(connection, batch_id, owner, status)
        return delete_lines(connection, batch_id, CHUNK_LINES)

    while await database.write(delete_some):
        pass


def _must_own(connection: Connection, batch_id: str, owner: str, status: BatchStatus) -> None:
    if not still_owns(connection, batch_id, owner, status):
        raise LostBatch(batch_id)


def _check(checker: LineChecker, raw_lines: Sequence[RawLine]) -> list[NewLine | BatchError]:
    return [checker.check(raw.data, raw.number) for raw in raw_lines]


def _rows(batch_id: str, start: int, new_lines: Sequence[NewLine]) -> list[LineRow]:
    return [new_row(batch_id, position, line) for position, line in enumerate(new_lines, start)]


def _keep(connection: Connection, batch_id: str, owner: str, rows: Sequence[LineRow]) -> list[int]:
    """Insert the rows whose custom ids are new; gives the positions of the others."""
    _must_own(connection, batch_id, owner, BatchStatus.VALIDATING)
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
