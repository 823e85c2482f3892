"""A jobs database with a manual clock, and helpers that make batches and line results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection

from replicas.clock import Clock
from replicas.protocol import Band
from serve_app.jobs.api.errors import UnknownFile
from serve_app.jobs.api.records import BatchKind, LineStatus, NewBatch, NewLine, Submission
from serve_app.jobs.api.settings import JobsSettings
from serve_app.jobs.storage.context import JobsContext
from serve_app.jobs.storage.database import Database
from serve_app.jobs.storage.invariants import check_invariants
from serve_app.jobs.storage.leases import LeasedLine, LineResult, lease_lines
from serve_app.jobs.storage.lines import new_row
from serve_app.jobs.storage.ownership import add_owner
from serve_app.jobs.storage.submission import submit_batch

MODEL = "tiny"
ENDPOINT = "/v1/completions"

T = TypeVar("T")


@dataclass
class MemoryFiles:
    """In-memory file store; its next `num_failures` operations fail."""

    files: dict[str, bytes] = field(default_factory=dict)
    part_bytes: int = 4096
    num_failures: int = 0

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        data = b"".join([part async for part in parts])
        self._fail()
        self.files[file_id] = data
        return len(data)

    async def read(self, file_id: str, start: int = 0, num_bytes: int | None = None) -> AsyncGenerator[bytes, None]:
        self._fail()
        if file_id not in self.files:
            raise UnknownFile(file_id)
        data = self.files[file_id][start:]
        for at in range(0, len(data), self.part_bytes):
            yield data[at : at + self.part_bytes]

    async def delete(self, file_id: str) -> None:
        self._fail()
        self.files.pop(file_id, None)

    def _fail(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the store does not answer")


class SetTime:
    """Manual clock with the same monotonic and unix time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = Clock(monotonic=lambda: self.now, unix=lambda: self.now)


class World:
    """One database with a file store in memory and a manual unix clock."""

    def __init__(self, database: Database, settings: JobsSettings | None = None) -> None:
        self.database = database
        self.settings = settings or JobsSettings(MODEL)
        self.now = 1_000_000.0
        self.clock = Clock(unix=lambda: self.now)
        self.files = MemoryFiles()
        self.num_batches = 0

    @property
    def context(self) -> JobsContext:
        return JobsContext(self.database, self.files, self.settings, self.clock)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction, check every invariant inside it, and return its result."""

        def checked(connection: Connection) -> T:
            result = work(connection)
            check_invariants(connection)
            return result

        return await self.database.write(checked)

    async def add_owner(self, owner: str) -> None:
        await self.write(lambda c: add_owner(c, owner, self.now))

    async def submit(self, new: NewBatch, batch_id: str | None = None) -> Submission:
        self.num_batches += 1
        chosen = batch_id or f"batch_{self.num_batches}"
        rows = [new_row(chosen, position, line) for position, line in enumerate(new.lines)]
        return await self.write(lambda c: submit_batch(c, new, chosen, rows, self.settings, self.now))

    async def lease(self, owner: str, batch_id: str, limit: int = 100) -> list[LeasedLine]:
        return await self.write(lambda c: lease_lines(c, owner, batch_id, limit))


def new_batch(num_lines: int = 3, kind: BatchKind = BatchKind.PROMPTS, **fields: Any) -> NewBatch:
    lines = tuple(NewLine(f"line-{index}", body(index)) for index in range(num_lines))
    given: dict[str, Any] = {"tenant": "acme", "endpoint": ENDPOINT, "band": Band.BATCH, "window_s": None}
    if kind is not BatchKind.FILE:
        given["lines"] = lines
    return NewBatch(kind=kind, **{**given, **fields})


def body(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"prompt {index}", "max_tokens": 4, **fields}


def success(line: LeasedLine) -> LineResult:
    return LineResult(line, LineStatus.SUCCEEDED, 200, '{"text":"yes"}', None, 3, 5)


def failure(line: LeasedLine) -> LineResult:
    error = '{"message":"no","type":"invalid_request_error","param":null,"code":"invalid_value"}'
    return LineResult(line, LineStatus.FAILED, 400, f'{{"error":{error}}}', error)
