"""Store of files, in a directory or in any store that fsspec knows by URL, and durable writes to a disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from replicas.timing.clock import Clock
from serve_app.jobs.api.errors import UnknownFile, storage_error_of

PART_BYTES = 2**20
"""Most bytes of one read or write."""

_FILE_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
_CLEAN_PERIOD_S = 3600.0
_MAX_WRITE_S = 86_400.0
"""Age in seconds after which the writer of an unfinished file counts as dead."""
_UNFINISHED = ".unfinished"
"""Folder of files that are being written. No id contains a dot, so no file has this name."""

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class FileStore(Protocol):
    """Store of files by id, read and written as streams. All processes with the same URL see the same files."""

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        """Store a file whole or not at all, and return its size in bytes. A file with the same id is replaced."""

    def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes in parts of at most 1 MiB.

        Raises:
            UnknownFile: there is no such file.
        """

    async def delete(self, file_id: str) -> None:
        """Delete a file; do nothing if it does not exist."""


class FsspecStore:
    """Implementation of `FileStore` on fsspec.

    A file is written under a temporary name and renamed when it is whole. On a local disk it is flushed before the
    rename. Blocking calls run in a thread pool.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        """`url`: a local path, or what fsspec takes, such as `s3://bucket/folder`.

        Raises:
            ImportError, ValueError: no installed package supports such URLs.
        """
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._root = root.rstrip("/")
        self._clock = clock or Clock()

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        """Store a file whole or not at all, and return its size in bytes. A file with the same id is replaced.

        Raises:
            UnknownFile: the id has an invalid form.
            StorageUnavailable: the store is full or cannot be written.
        """
        path = self._path(file_id)
        name = f"{int(self._clock.unix())}.{file_id}.{uuid.uuid4().hex}"
        unfinished = _UnfinishedFile(self._fs, f"{self._root}/{_UNFINISHED}/{name}")
        num_bytes = 0
        try:
            async with contextlib.aclosing(in_parts_of(PART_BYTES, parts)) as equal_parts:
                async for part in equal_parts:
                    await _run_to_its_end(partial(unfinished.append, part))
                    num_bytes += len(part)
            await _run_to_its_end(partial(unfinished.move_to, path))
        except BaseException as error:
            await _run_to_its_end(unfinished.discard)
            if isinstance(error, OSError) and error.errno is not None:  # a time-out has no number
                logger.error("a file could not be stored", exc_info=True, extra={"file_id": file_id})
                raise storage_error_of(error) from error
            raise
        return num_bytes

    async def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes in parts of at most 1 MiB.

        Raises:
            UnknownFile: there is no such file.
        """
        parts = self._parts(self._path(file_id))
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield part

    async def delete(self, file_id: str) -> None:
        """Delete a file; do nothing if it does not exist."""
        path = self._path(file_id)
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(self._fs.rm_file, path)

    async def keep_clean(self) -> None:
        """Delete unfinished files of dead writers once an hour, until cancelled."""
        while True:
            try:
                await self.delete_unfinished(_MAX_WRITE_S)
            except Exception:  # each store's library has its own errors; the next round tries again
                logger.warning("unfinished files could not be deleted", exc_info=True)
            await asyncio.sleep(_CLEAN_PERIOD_S)

    async def delete_unfinished(self, older_than_s: float) -> int:
        """Delete unfinished files begun more than `older_than_s` ago, and return their number."""
        return await asyncio.to_thread(self._delete_unfinished, self._clock.unix() - older_than_s)

    def _path(self, file_id: str) -> str:
        if not _FILE_ID.fullmatch(file_id):
            raise UnknownFile(f"there is no file {file_id[:100]!r}")
        return f"{self._root}/{file_id}"

    def _parts(self, path: str) -> Iterator[bytes]:
        """Yield the parts, each read by position: in some stores all readers of a file share one position."""
        try:
            size = self._fs.info(path)["size"]
            for at in range(0, size, PART_BYTES):
                yield self._fs.cat_file(path, start=at, end=min(size, at + PART_BYTES))
        except FileNotFoundError as error:
            raise UnknownFile(f"there is no file {path.rsplit('/', 1)[1]!r}") from error

    def _delete_unfinished(self, before_unix_s: float) -> int:
        num_deleted = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self._fs.ls(f"{self._root}/{_UNFINISHED}", detail=False):
                begun_unix_s, _, _ = path.rsplit("/", 1)[1].partition(".")
                if begun_unix_s.isdecimal() and int(begun_unix_s) < before_unix_s:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(path)
                        num_deleted += 1
        return num_deleted


class _UnfinishedFile:
    """File that is being written, until `move_to` or `discard`. Used by one thread at a time."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._is_local = isinstance(fs, LocalFileSystem)
        self._file: Any = None

    def append(self, part: bytes) -> None:
        self._open().write(part)

    def move_to(self, path: str) -> None:
        """Rename the finished file to `path`, replacing any file there."""
        file = self._open()
        if self._is_local:
            sync_file(file)
        file.close()
        self._fs.mv(self._path, path)
        if self._is_local:
            sync_directory(Path(path).parent)

    def discard(self) -> None:
        """Try to delete the file; if that fails, `delete_unfinished` deletes it later."""
        if self._file is None:
            return
        try:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path)
        except Exception:  # each store's library has its own errors; none may hide the error that led here
            logger.warning("an unfinished file could not be deleted", exc_info=True, extra={"path": self._path})

    def _open(self) -> Any:
        if self._file is None:
            parent = self._path.rsplit("/", 1)[0]
            if self._is_local:
                make_directory(Path(parent))
                Path(self._path).touch(mode=0o600)
            else:
                self._fs.makedirs(parent, exist_ok=True)
            self._file = self._fs.open(self._path, "wb")
        return self._file


async def in_parts_of(num_bytes: int, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the same bytes in parts of `num_bytes`; the last part may be shorter, and none is empty."""
    buffer = bytearray()
    async for part in parts:
        for at in range(0, len(part), num_bytes):
            buffer += part[at : at + num_bytes]
            if len(buffer) >= num_bytes:
                yield bytes(buffer[:num_bytes])
                del buffer[:num_bytes]
    if buffer:
        yield bytes(buffer)


async def _run_to_its_end(work: Callable[[], ResultT]) -> ResultT:
    """Run `work` in a thread and return its result.

    A cancellation is raised only after `work` has ended, because until then the thread uses the file.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # retrieve it, or asyncio logs it as never retrieved
        raise cancelled
    return running.result()


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably, all with mode 0700."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def sync_file(file: IO[Any]) -> None:
    """Flush a file's contents to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
