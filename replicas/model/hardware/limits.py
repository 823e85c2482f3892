"""Limits of this process's memory and processors: those of its control groups and their parents, and of its user.

Docker, Kubernetes and systemd set them in control groups of version 1 or 2. The smallest of all counts. The module
imports no torch.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_NO_LIMIT_BYTES = 2**60
"""Version 1 says "no limit" with the largest number of whole pages."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of memory, bytes, and what is free below it."""

    total: int
    free: int
    source: str


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """A limit of the processors that run at the same time, which may be a fraction."""

    num_cpus: float
    source: str


def available_memory_bytes() -> int:
    """Return the memory that this process may still take."""
    return memory_limit().free


def unshared_bytes(process: psutil.Process) -> int | None:
    """Return the memory of a process without mapped files, bytes; None: the system does not tell."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared) if hasattr(memory, "shared") else None


def memory_limit(process: Path = _PROCESS) -> MemoryLimit:
    """Return the limit of memory with the least free memory below it."""
    machine = psutil.virtual_memory()
    limits = [MemoryLimit(machine.total, machine.available, "no limit of a container")]
    for folder in _control_groups("memory", process):
        limits += filter(None, (_memory_of(folder, *names) for names in _MEMORY_FILES))
    for name, kind in (("ulimit -v", resource.RLIMIT_AS), ("ulimit -d", resource.RLIMIT_DATA)):
        size, _ = resource.getrlimit(kind)
        if size != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(size, size, name))
    return min(limits, key=lambda limit: limit.free)


def cpu_limit(process: Path = _PROCESS) -> CpuLimit:
    """Return the smallest limit of processors."""
    num_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [CpuLimit(num_usable, "no limit of a container")]
    for folder in _control_groups("cpu", process):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit():  # else `max`, or -1
            limits.append(CpuLimit(int(quota[0]) / int(quota[1]), str(folder)))
    return min(limits, key=lambda limit: limit.num_cpus)


_MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.high", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""Files of a limit and of its use, and the fields of `memory.stat` with the files in memory.

Files in memory count as used, although the kernel gives them back when asked. Above `memory.high` a process is slowed
down to a crawl, so it counts as a limit.
"""


def _memory_of(folder: Path, limit_name: str, used_name: str, file_fields: tuple[str, ...]) -> MemoryLimit | None:
    limit, used = _words(folder / limit_name), _words(folder / used_name)
    if not (limit and used and limit[0].isdigit()) or int(limit[0]) >= _NO_LIMIT_BYTES:
        return None
    words = _words(folder / "memory.stat")
    fields = dict(zip(words[::2], words[1::2], strict=False))
    cached = sum(int(fields.get(name, 0)) for name in file_fields)
    return MemoryLimit(int(limit[0]), max(0, int(limit[0]) - int(used[0]) + cached), str(folder / limit_name))


def _control_groups(controller: str, process: Path) -> Iterator[Path]:
    """Yield the folders of the process's control groups with a controller, and of all their parents.

    See cgroups(7). A container sees its group as the root of the mount, or by its path on the host: both are tried.
    """
    paths = {}
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    for line in _lines(process / "mountinfo"):
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, *options = after.split()
        if kind == "cgroup2":
            group = paths.get("")
        elif kind == "cgroup" and controller in options[-1].split(","):
            group = paths.get(controller)
        else:
            continue
        if group is not None:
            yield from _with_parents(Path(mount), root, group)


def _with_parents(mount: Path, root: str, path: str) -> Iterator[Path]:
    inner = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
    folder = mount / inner if ".." not in inner.parts else mount
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # There is no such file: another version, or another system.
        return []
