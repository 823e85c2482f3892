"""Processes of the ranks after the first one: their start, the watch over them, and their end with it."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.parallel.shares import Share
from replicas.model.ranks.ring import RingFiles

_log = logging.getLogger(__name__)

_END_LIMIT_S = 5.0
_MOST_ERROR_BYTES = 4000


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of a replica that all its ranks need."""

    model: ModelOptions
    runner: RunnerOptions
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class RankTask:
    """Task of one rank process."""

    options: RankOptions
    share: Share
    meeting_file: Path
    """New file through which the ranks find each other."""
    ring: RingFiles
    error_file: int
    """Descriptor of the file that gets the error with which the process ends."""


class RankProcesses:
    """Processes of the ranks 1 to `num_ranks` - 1, which load their parts of a model and follow the ring.

    Their standard input ends with this process, however it ends. Then they exit at once.
    """

    def __init__(self, options: RankOptions, num_ranks: int, lost: Callable[[str], None]) -> None:
        """Start the processes. `lost` is called in a thread, with a sentence, when one of them has ended by itself."""
        self._lost = lost
        self._is_ending = False
        self._folder = tempfile.TemporaryDirectory(prefix="headway-ranks-", ignore_cleanup_errors=True)
        self.meeting_file = Path(self._folder.name, "meeting")
        """File through which the ranks find each other."""
        self.ring = RingFiles.create(num_ranks - 1)
        """Ring that the processes read."""
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, num_ranks):
            self._start(options, Share(rank, num_ranks))

    def end(self) -> None:
        """End the processes, and wait for it."""
        self._is_ending = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the file through which the ranks have met: this process ends, and with it the others."""
        self._folder.cleanup()

    def _start(self, options: RankOptions, share: Share) -> None:
        error_file = os.memfd_create("headway-rank-error")
        task = RankTask(options, share, self.meeting_file, self.ring, error_file)
        process = subprocess.Popen(
            [sys.executable, "-m", "replicas.model.ranks.main"],
            stdin=subprocess.PIPE,
            # The same code as here, wherever a cluster has put it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(self.ring.memory, *self.ring.events, error_file),
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(task))
        process.stdin.flush()
        self._processes.append(process)
        threading.Thread(
            target=self._watch, args=(process, share.rank, error_file), name=f"rank {share.rank}", daemon=True
        ).start()

    def _watch(self, process: subprocess.Popen[bytes], rank: int, error_file: int) -> None:
        status = process.wait()
        error = os.pread(error_file, _MOST_ERROR_BYTES, 0).decode(errors="replace")
        os.close(error_file)
        if not self._is_ending:
            self._lost(f"rank {rank} has ended: {error or f'exit status {status}'}")


def end_process(reason: str) -> None:
    """End this process: it is the first rank, and another one is lost. Its requests go on elsewhere.

    Collectives of a GPU that wait for the lost rank would never return.
    """
    _log.critical("the replica ends: %s", reason)
    logging.shutdown()
    os._exit(1)
