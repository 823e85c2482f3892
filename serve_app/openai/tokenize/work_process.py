"""Processes for large work of less urgent bands: it takes no turns of the caller's GIL, and the processor last.

The fault of one process concerns its own work alone. Libraries' pools do not promise that: in loky 3.7 and in
`concurrent.futures` the death of one process ends the work of all; in Pebble 5.2 a process that stops within its answer
blocks the pipe that all share, past its time limit.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from replicas.errors import NoReplicaAvailable
from serve_app.process import return_freed_memory

ResultT = TypeVar("ResultT")

_NICE = 10
_MAX_MEMORY_BYTES = 2 * 2**30
"""Most memory of a process; one that needs more ends."""
_LIMIT_S, _END_LIMIT_S = 60.0, 5.0
_RETRY_S = 30.0
"""Shortest time between two starts of processes, seconds."""


class WorkProcess:
    """Process that does one piece of work at a time, at low priority. It ends when its creator lets go of it or dies.

    The work and its result are pickled.
    """

    def __init__(self, prepare: Callable[[], object]) -> None:
        """Start the process; it calls `prepare` before it is ready."""
        self._connection, theirs = Pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",  # Texts are encoded in one thread.
        }
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        self._connection.send(partial(_prepare, prepare))
        self._is_ready = False

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Return True if the process has prepared.

        Raises:
            NoReplicaAvailable: the process has ended, or cannot prepare.
        """
        if not self._is_ready and self._connection.poll():
            self._receive()
            self._is_ready = True
        return self._is_ready

    def call(self, work: Callable[[], ResultT]) -> ResultT:
        """Do a piece of work in the process and return its result.

        Raises:
            NoReplicaAvailable: the process ended before it had the result, or took longer than it may.
        """
        # A process that stops within a message holds the sender or the receiver of the message for ever.
        timer = threading.Timer(_LIMIT_S, self._process.kill)
        timer.start()
        try:
            self._send(work)
            result: ResultT = self._receive()
            return result
        finally:
            timer.cancel()

    @property
    def has_ended(self) -> bool:
        """True if the process does no more work."""
        return not self._end.alive

    def end(self) -> None:
        """End the process."""
        self._end()

    def _send(self, work: Callable[[], object]) -> None:
        try:
            self._connection.send(work)
        except OSError:
            self.end()
            raise _lost() from None

    def _receive(self) -> Any:
        try:
            is_done, result = self._connection.recv()
        except (EOFError, OSError):
            self.end()
            raise _lost() from None
        if not is_done:
            raise result
        return result


class WorkProcesses:
    """Processes for work, started when first wanted; until one is ready, work is done in the calling thread.

    Any thread may call it. A process that has ended is replaced when work is next wanted.

    Invariant: at most `max_processes` run, and at most one of them is being started.
    """

    def __init__(
        self, prepare: Callable[[], object], max_processes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the pool without a process; each calls `prepare` first. `clock` gives monotonic seconds."""
        self._prepare = prepare
        self._max_processes = max_processes
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[WorkProcess] = []
        self._starting: WorkProcess | None = None
        self._num_busy = 0
        self._next_start_s = clock()

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of `work`, which is pickled.

        Raises:
            NoReplicaAvailable: the process ended before it had the result, or took longer than it may.
        """
        with self._lock:
            process = self._take()
        if process is None:
            return work()
        try:
            return process.call(work)
        finally:
            with self._lock:
                self._num_busy -= 1
                if not process.has_ended:
                    self._idle.append(process)

    def _take(self) -> WorkProcess | None:
        """Return an idle process; without one, start one for later work and return None."""
        self._admit()
        if self._idle:
            self._num_busy += 1
            return self._idle.pop()
        now_s = self._clock()
        if self._starting is None and self._num_busy < self._max_processes and now_s >= self._next_start_s:
            self._next_start_s = now_s + _RETRY_S
            with contextlib.suppress(OSError):  # The machine has no room for a process now.
                self._starting = WorkProcess(self._prepare)
        return None

    def _admit(self) -> None:
        """Admit the process that is being started to the idle ones if it is ready."""
        if self._starting is None:
            return
        try:
            is_ready = self._starting.is_ready()
        except NoReplicaAvailable:
            self._starting = None
            return
        if is_ready:
            self._idle.append(self._starting)
            self._starting = None


def _lost() -> NoReplicaAvailable:
    message = "the process that read this request has ended; smaller requests are read elsewhere"
    return NoReplicaAvailable(message, "reader_lost", retry_after_s=1.0)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait(_END_LIMIT_S)


def _prepare(prepare: Callable[[], object]) -> None:
    """Call `prepare`; its result stays in the process."""
    prepare()


def _answer(data: bytes) -> bytes:
    """Do the pickled work; return whether it was done, and its result or its error."""
    try:
        return pickle.dumps((True, pickle.loads(data)()), pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        return _pickled_error(error)


def _pickled_error(error: Exception) -> bytes:
    try:
        return pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
    except Exception:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


def main() -> None:
    """Do work until the connection ends."""
    os.nice(_NICE)
    return_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to the parent too, which then ends this process.
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            connection.send_bytes(_answer(connection.recv_bytes()))
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    main()
