"""What it takes for a file to be found again after the machine has lost its power."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class OpenFile(Protocol):
    """A file that is open for writing."""

    def flush(self) -> None:
        """Hand everything to the operating system."""
        ...

    def fileno(self) -> int:
        """The descriptor."""
        ...


def make_directory(path: Path) -> None:
    """Make a directory that only we can enter, and those above it, so that they stay."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def sync_file(file: OpenFile) -> None:
    """Put what was written onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Put the names in a directory onto the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
