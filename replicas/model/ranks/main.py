"""Main module of a rank process: `python -m replicas.model.ranks.main`, with a `RankTask` in standard input."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import time
import traceback

from replicas.errors import ModelLoadError
from replicas.model.ranks.processes import RankTask
from replicas.model.ranks.ring import RingReader

_WATCHDOG_S = 0.5
"""Time after an error, seconds. If the end of the first rank was the reason, the watchdog removes its files."""


def main() -> None:
    """Load the rank's part of the model, and run the steps of the first rank until that ends."""
    task: RankTask = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_first_rank, args=(task,), name="watchdog", daemon=True).start()
    try:
        # Imports of torch take seconds, in which the first rank may end.
        from replicas.model.ranks.leading_runner import FollowingRunner
        from replicas.model.ranks.parts import joined_part

        part = joined_part(task.options, task.share, task.meeting_file)
        FollowingRunner(part.runner, RingReader(task.ring, task.share.rank - 1)).follow()
    except ModelLoadError as error:
        _end(task, str(error))
    except Exception as error:
        traceback.print_exc()
        _end(task, f"{type(error).__name__}: {error}")


def _end_with_first_rank(task: RankTask) -> None:
    """End this process when standard input ends, whatever it is doing."""
    sys.stdin.buffer.read()
    shutil.rmtree(task.meeting_file.parent, ignore_errors=True)  # The first rank may have been killed.
    os._exit(1)


def _end(task: RankTask, error: str) -> None:
    """End the process without libraries, which may wait for the other ranks at a usual end."""
    os.pwrite(task.error_file, error.encode(), 0)
    time.sleep(_WATCHDOG_S)
    os._exit(1)


if __name__ == "__main__":
    main()
