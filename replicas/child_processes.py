"""Child processes that a start waits for: each may take as long as it makes progress."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Self

import psutil

START_TIMEOUT_VARIABLE = "HEADWAY_START_TIMEOUT_S"
"""Environment variable with the longest time that a step of a start may go without progress, seconds."""
_START_TIMEOUT_S = 120.0
_POLL_PERIOD_S = 0.25
_MOST_SLOWNESS = 4.0
_WATCHED_BYTES = 400


class Stalled(Exception):
    """A step of a start made no progress for too long, or computes without an end; the message names its limit."""

    @classmethod
    def without_progress(cls, step: str, limit_s: float) -> Self:
        """Return the error of a step that made no progress for `limit_s` seconds; it names the limit's setting."""
        set_s = start_timeout_s()
        reason = f", {limit_s / set_s:.1f} times {set_s:.0f} s since this machine is slow" if limit_s > set_s else ""
        return cls(
            f"{step} made no progress for {limit_s:.0f} s (the limit{reason}); if it only needs longer, set "
            f"{START_TIMEOUT_VARIABLE} to more seconds"
        )


class Progress:
    """Watch over the steps of a start: it ends when a measure of their work has not changed for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._measure: Hashable = None
        self._changed_s = time.monotonic()

    def note(self, step: str, measure: Hashable) -> None:
        """Compare the measure with the one before; `step` is the name of what is waited for.

        Raises:
            Stalled: it has been the same for too long.
        """
        now_s = time.monotonic()
        if measure != self._measure:
            self._measure, self._changed_s = measure, now_s
        elif now_s - self._changed_s > self._limit_s:
            raise Stalled.without_progress(step, self._limit_s)


def start_timeout_s() -> float:
    """Return the longest time that a step of a start may go without progress, seconds.

    Raises:
        ValueError: the environment variable is no positive number.
    """
    text = os.environ.get(START_TIMEOUT_VARIABLE)
    limit_s = _START_TIMEOUT_S if text is None else _number(text)
    if not limit_s > 0:
        raise ValueError(f"{START_TIMEOUT_VARIABLE} is {text}; it must be a number of seconds above 0")
    return limit_s


def run_child(
    step: str,
    command: Sequence[str],
    cpu_limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    output: int | IO[str] = subprocess.PIPE,
    watch: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `step` is its name in errors, and `output` takes what it prints.

    `watch` gets the end of its errors so far, several times a second.

    A process that computes, reads or writes makes progress. One that computes forever ends at `cpu_limit_s` seconds of
    processor time, which does not depend on the machine's other load.

    Raises:
        Stalled: it made no progress, or reached `cpu_limit_s`. It and its children have been killed.
    """
    progress = Progress(start_timeout_s())
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=output, stderr=errors, text=True) as child,
    ):
        process = psutil.Process(child.pid)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    out, _ = child.communicate(timeout=_POLL_PERIOD_S)
                    return subprocess.CompletedProcess(command, child.returncode, out or "", _end_of(errors, None))
                if watch is not None:
                    watch(_end_of(errors, _WATCHED_BYTES))
                cpu_s, num_bytes = work_of(process)
                progress.note(step, (cpu_s, num_bytes))
                if cpu_limit_s is not None and cpu_s > cpu_limit_s:
                    raise Stalled(f"{step} has computed for {cpu_limit_s:.0f} s, its limit, without an end")
        except BaseException:
            for descendant in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    descendant.kill()
            raise


def _end_of(file: IO[str], num_bytes: int | None) -> str:
    """Return the last bytes of a file as text; None: the whole file."""
    size = os.fstat(file.fileno()).st_size
    start = 0 if num_bytes is None else max(0, size - num_bytes)
    return os.pread(file.fileno(), size - start, start).decode(errors="replace")


def work_of(process: psutil.Process) -> tuple[float, int]:
    """Return the processor time of a process and its descendants, seconds, and the bytes that they read and wrote."""
    cpu_s, num_bytes = 0.0, 0
    with suppress(psutil.Error):
        for descendant in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                times = descendant.cpu_times()
                cpu_s += times.user + times.system
                counters = descendant.io_counters()
                num_bytes += counters.read_chars + counters.write_chars
    return cpu_s, num_bytes


def machine_slowness() -> float:
    """Return how many times longer this process has lived than it has computed, from 1 to 4.

    A process that has only imported and computed so far shows with it what share of a processor it gets.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 1.0
    started_s = psutil.Process().create_time() - psutil.boot_time()  # in the clock that nobody sets
    elapsed_s: float = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return min(_MOST_SLOWNESS, max(1.0, elapsed_s / max(0.01, time.process_time())))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
