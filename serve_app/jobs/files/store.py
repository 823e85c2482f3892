"""Interface of the file store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol


class FileStore(Protocol):
    """Store of files by id, read and written as streams. All processes with the same URL see the same files."""

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        """Store a file whole or not at all, and return its size in bytes. A file with the same id is replaced."""
        ...

    def read(self, file_id: str, start: int = 0, num_bytes: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the bytes [start, start + num_bytes), or up to the end, in parts of at most 1 MiB.

        Raises:
            UnknownFile: there is no such file.
        """
        ...

    async def delete(self, file_id: str) -> None:
        """Delete a file; do nothing if it does not exist."""
        ...
