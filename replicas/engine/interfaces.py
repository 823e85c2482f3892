"""Interfaces of the engine to a model: computing steps and decoding tokens."""

from __future__ import annotations

from typing import Protocol

from replicas.engine.batch import ItemResult, ScheduledBatch


class LaunchedStep(Protocol):
    """A step that the device is working on, or has done."""

    def collect(self) -> list[ItemResult]:
        """Wait for the step and return one result per item, in order. Called once, in the order of the launches.

        Raises:
            Exception: the whole batch failed; nothing about it, nor what was launched after it, can be relied on.
        """
        ...


class ModelRunner(Protocol):
    """The only thing that knows a device."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Begin to compute every scheduled token, write its KV, sample where an item samples.

        Steps take effect in the order of their launches. A token that the step launched last samples may be the last
        of an item here before anybody has collected it. Running an item again writes the same KV.

        Raises:
            Exception: the batch failed; steps launched before are not touched.
        """
        ...


class IncrementalDecoder(Protocol):
    """The decoder of one sequence's output tokens, one at a time."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty in the middle of a character, and for a special token."""
        ...
