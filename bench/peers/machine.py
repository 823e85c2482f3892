"""The machine during a measurement: CPU time by process, and a lock that lets one measurement run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_URGENT = -15
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Shares:
    """Percentages of all cores' time."""

    own: float
    other: float
    """Share of other processes. Above a few percent, the figures beside it are too low."""
    steal: float
    """Share of the hypervisor (steal time)."""


@dataclass(frozen=True, slots=True)
class _Ticks:
    total: int
    idle: int
    steal: int
    own: int


class ProcessorMeter:
    """Meter of CPU time since its last reading, or since its construction."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = _ticks(pids)

    def shares(self) -> Shares:
        """Return the shares of these processes and of the rest of the machine."""
        start, end = self._start, _ticks(self._pids)
        self._start = end
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


def peak_memory_bytes(pids: Sequence[int]) -> int:
    """Return the sum of the processes' peak resident sets."""
    peak_kb = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "status").read_text().splitlines()
            peak_kb += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return 1024 * peak_kb


@contextlib.contextmanager
def alone(lock: Path, pids: Sequence[int]) -> Iterator[None]:
    """Hold the measurement lock, with this process and `pids` above background work if the kernel permits."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            _set_urgency(pids, _URGENT)
            time.sleep(_SETTLE_S)
            yield
        finally:
            _set_urgency(pids, 0)


def _set_urgency(pids: Sequence[int], niceness: int) -> None:
    """Set the autogroup priority of this process and `pids`.

    With `kernel.sched_autogroup_enabled`, `nice` counts only inside a session; the autogroup file counts between
    sessions.
    """
    for pid in (os.getpid(), *pids):
        with contextlib.suppress(OSError):
            (_PROC / str(pid) / "autogroup").write_text(str(niceness))
