"""In-memory file store, which tests control."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from serve_app.jobs.api.errors import UnknownFile


@dataclass
class MemoryFiles:
    """File store in a dictionary; its next `num_failures` operations fail."""

    files: dict[str, bytes] = field(default_factory=dict)
    part_bytes: int = 4096
    num_failures: int = 0
    num_written_bytes: int = 0
    """Bytes written, those of unfinished files included."""
    num_read_bytes: int = 0
    num_open_reads: int = 0

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        content = bytearray()
        async for part in parts:
            self.num_written_bytes += len(part)
            content += part
        self._fail()
        self.files[file_id] = bytes(content)
        return len(content)

    async def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        self._fail()
        if file_id not in self.files:
            raise UnknownFile(file_id)
        content = self.files[file_id]
        self.num_open_reads += 1
        try:
            for at in range(0, len(content), self.part_bytes):
                part = content[at : at + self.part_bytes]
                self.num_read_bytes += len(part)
                yield part
        finally:
            self.num_open_reads -= 1

    async def delete(self, file_id: str) -> None:
        self._fail()
        self.files.pop(file_id, None)

    def _fail(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the store does not answer")
