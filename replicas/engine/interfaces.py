"""Interfaces of the engine to a model: one computes steps, one decodes tokens."""

from __future__ import annotations

from typing import Protocol

from replicas.engine.batch import ItemResult, ScheduledBatch


class LaunchedStep(Protocol):
    """Step that the device is computing or has computed."""

    def collect(self) -> list[ItemResult]:
        """Wait for the step and return one result per item, in order. Called once, in the order of the launches.

        Raises:
            Exception: the whole batch failed; the results of this step and of all launched after it are invalid.
        """
        ...


class ModelRunner(Protocol):
    """Runner of a model on a device; the only object that knows the device."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Begin to compute all scheduled tokens, write their KV, and sample for the items that sample.

        Steps take effect in the order of their launches. The last token of an item may be the one that the previous
        step samples, even if that step has not been collected. Running an item again writes the same KV.

        Raises:
            Exception: the batch failed; steps launched before are not affected.
        """
        ...


class IncrementalDecoder(Protocol):
    """Decoder of one sequence's output tokens, one at a time."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty in the middle of a character, and for a special token."""
        ...
