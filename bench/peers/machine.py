"""The machine while something is measured: who uses its processors, and that only one measurement runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_URGENT = -15
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Shares:
    """Percent of all cores' time."""

    own: float
    other: float
    """What other processes took: above a few percent, the figures beside it are too low."""
    steal: float
    """What the hypervisor took."""


@dataclass(frozen=True, slots=True)
class _Ticks:
    total: int
    idle: int
    steal: int
    own: int


class ProcessorMeter:
    """Shares of the processors' time since it was made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = _ticks(pids)

    def shares(self) -> Shares:
        """What the processes named took since then, and the rest of the machine."""
        start, end = self._start, _ticks(self._pids)
        total = max(1, end.total - start.total)
        own = end.own - start.own
        other = (end.total - start.total) - (end.idle - start.idle) - own
        return Shares(100 * own / total, 100 * other / total, 100 * (end.steal - start.steal) / total)


def _ticks(pids: Sequence[int]) -> _Ticks:
    with (_PROC / "stat").open() as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    own = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            after_name = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
            own += sum(int(field) for field in after_name[11:15])
    return _Ticks(sum(fields), fields[3] + fields[4], fields[7], own)


def peak_memory_mb(pids: Sequence[int]) -> float:
    """Sum of the processes' largest resident sets, MiB."""
    peak_kb = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "status").read_text().splitlines()
            peak_kb += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return round(peak_kb / 1024, 1)


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for directory in _PROC.iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((directory / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children[parent].append(int(directory.name))
    tree, found = [], [pid]
    while found:
        tree.append(found.pop())
        found += children[tree[-1]]
    return tree


@contextlib.contextmanager
def alone(lock: Path, pids: Sequence[int]) -> Iterator[None]:
    """The machine's one measurement, before all background work as far as the kernel lets us."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            _set_urgency(pids, _URGENT)
            time.sleep(_SETTLE_S)
            yield
        finally:
            _set_urgency(pids, 0)


def _set_urgency(pids: Sequence[int], niceness: int) -> None:
    """With `kernel.sched_autogroup_enabled`, `nice` counts only inside a session; between sessions it is this file."""
    for pid in (os.getpid(), *pids):
        with contextlib.suppress(OSError):
            (_PROC / str(pid) / "autogroup").write_text(str(niceness))
