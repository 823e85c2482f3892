"""Flushing of files and directories to disk, to survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class OpenFile(Protocol):
    """File that is open for writing."""

    def flush(self) -> None:
        """Hand all buffered bytes to the operating system."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor."""
        ...


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably, all with mode 0700."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def sync_file(file: OpenFile) -> None:
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
