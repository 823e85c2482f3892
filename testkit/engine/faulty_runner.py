"""Runner over another one, whose device fails certain sequences, or everything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from replicas.engine.batch import LaunchedStep, ModelRunner, ScheduledBatch

GUILTY = (7, 7, 7, 7)
"""Prompt whose sequences fail every batch that computes them."""
FAULTS_VARIABLE = "HEADWAY_TEST_FAULTS"
"""Environment variable with a folder. A process's device is broken while the folder has a file named by its id."""


@dataclass(frozen=True, slots=True)
class FaultyRunner:
    """Runner that fails batches with a guilty sequence, and all batches while its device is broken."""

    runner: ModelRunner

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        folder = os.environ.get(FAULTS_VARIABLE)
        if folder is not None and Path(folder, str(os.getpid())).exists():
            raise RuntimeError("the device is broken")
        if any(item.sequence.request.prompt_token_ids == GUILTY for item in batch.items):
            raise IndexError("index out of range in self")
        return self.runner.launch(batch)
