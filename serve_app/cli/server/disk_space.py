"""Free space on the disks of a server: checked before its start, and watched while it runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

_LEAST_FREE_BYTES = 50_000_000
_AMPLE_FREE_BYTES = 2 * _LEAST_FREE_BYTES
"""Free space at which a disk counts as emptied again."""


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder."""
    return shutil.disk_usage(folder).free


def lack_of_space(folder: Path, setting: str | None, num_free: int) -> str | None:
    """Return the sentence that says that a disk is nearly full, and what to do; None: it is not.

    `setting` is that of the folder, such as `data_dir`; None: the folder is always the same.
    """
    if num_free >= _LEAST_FREE_BYTES:
        return None
    name = _name_of(folder, setting)
    space = f"{name} has {decimal(num_free)} free on its disk; a server needs {decimal(_LEAST_FREE_BYTES)}"
    return f"{space}: make room" + ("" if setting is None else f", or name another one with {setting}=FOLDER")


def _name_of(folder: Path, setting: str | None) -> str:
    return str(folder) if setting is None else f"{setting} {folder}"


class DiskWatch:
    """Watch over the disks of some folders: it reports a disk once when it is nearly full, and once when it is not.

    `folders` maps the setting of each folder to the folder; None: the folder has none.
    """

    def __init__(self, folders: Mapping[str | None, Path], free: Callable[[Path], int] = free_bytes) -> None:
        self._folders, self._free = folders, free
        self._full: set[str | None] = set()

    def news(self) -> Iterator[str]:
        """Yield a line for each disk whose state has changed since the last call."""
        for setting, folder in self._folders.items():
            with suppress(OSError):  # the folder is gone: its users say so
                num_free = self._free(folder)
                lack = lack_of_space(folder, setting, num_free)
                if lack is not None and setting not in self._full:
                    self._full.add(setting)
                    yield f"warning: {lack}"
                elif num_free >= _AMPLE_FREE_BYTES and setting in self._full:
                    self._full.remove(setting)
                    yield f"{_name_of(folder, setting)} has {decimal(num_free)} free again."
