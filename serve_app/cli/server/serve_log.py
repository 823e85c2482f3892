"""Log file of `headway serve`: what Ray, Serve and the replicas print goes there, not to the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from serve_app.cli.server.locks import try_lock

_NUM_KEPT = 10
"""Log files that are kept in a folder."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """Standard output and error as they were when the command started."""

    out: TextIO
    err: TextIO


@contextlib.contextmanager
def new_log_file(folder: Path, port: int) -> Iterator[Path]:
    """Create a log file in `folder`, readable by its owner alone, and delete all but the newest ones.

    It is locked within the context, and no locked one is deleted: servers may share a folder.

    Raises:
        OSError: the folder cannot be written, or another server began the same file in this second.
    """
    for private in (folder.parent, folder):
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"serve-{time.strftime('%Y%m%dT%H%M%S')}-{port}.log"
    lock = try_lock(path)
    if lock is None:
        raise OSError(f"another server writes to {path}")
    with lock:
        for old in sorted(folder.glob("serve-*.log"))[:-_NUM_KEPT]:
            unused = try_lock(old)
            if unused is not None:
                with unused:
                    old.unlink(missing_ok=True)
        yield path


class Tail:
    """Reader of the lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_lines(self) -> list[str]:
        """Return the lines that have been completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole.decode(errors="replace").splitlines()


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[Terminal]:
    """Send what this process and its children print to the file at `path`; yield the terminal.

    File descriptors are replaced, not `sys.stdout`: the C++ parts of Ray and its daemons write to them, too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    originals = os.dup(1), os.dup(2)
    with (
        open(path, "ab", buffering=0) as log,
        open(originals[0], "w", buffering=1, encoding="utf-8", errors="replace", closefd=False) as out,
        open(originals[1], "w", buffering=1, encoding="utf-8", errors="replace", closefd=False) as err,
    ):
        try:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            yield Terminal(out, err)
        finally:
            for stream, descriptor, original in ((sys.stdout, 1, originals[0]), (sys.stderr, 2, originals[1])):
                stream.flush()
                os.dup2(original, descriptor)
                os.close(original)
