"""Locks on files, by which the servers of a user leave each other's files alone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def try_lock(path: Path) -> BinaryIO | None:
    """Lock a file, which is created for its owner alone; None: another process has locked it.

    The lock lasts until the returned file is closed, here and in the processes that were forked meanwhile. Programs
    that these start do not have it.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return None
        raise
    return file
