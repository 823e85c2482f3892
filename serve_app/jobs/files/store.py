"""The bytes of files, in a directory or an object store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol


class FileStore(Protocol):
    """Files by id, streamed; whoever holds the same URL sees the same files."""

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        """Store a file whole or not at all; gives its size in bytes. A file of that name is replaced."""
        ...

    def read(self, file_id: str, start: int = 0, num_bytes: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes [start, start + num_bytes), or up to the end, in parts of at most 1 MiB.

        Raises:
            UnknownFile: there is none.
        """
        ...

    async def delete(self, file_id: str) -> None:
        """Delete a file; one that is not there is deleted already."""
        ...
