"""First rank that starts the others and computes nothing, in a process of its own that tests may kill.

Run `python -m testkit.model.rank_starter CHECKPOINT RANKS`. It imports no torch, so it is there at once.
"""

from __future__ import annotations

import sys
import threading

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.ranks.processes import RankOptions, RankProcesses, end_process


def main() -> None:
    """Start the other ranks, which wait for this one, and end when one of them does."""
    num_ranks, lost, reasons = int(sys.argv[2]), threading.Event(), []

    def note(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    model = ModelOptions(sys.argv[1], dtype="float32", device="cpu", kernel_cache_dir=None)
    processes = RankProcesses(RankOptions(model, RunnerOptions(), EngineLimits()), num_ranks, note)
    print("started", flush=True)
    lost.wait()
    processes.remove_files()
    end_process(reasons[0])


if __name__ == "__main__":
    main()
