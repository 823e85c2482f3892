"""Steps on their way through the device."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.engine.batch import (
    FailedStep,
    ItemResult,
    LaunchedStep,
    ModelRunner,
    ScheduledBatch,
    ScheduledSequence,
)
from replicas.engine.scheduler import Scheduler

_MAX_FAILED_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched batch whose results have not been collected."""

    batch: ScheduledBatch
    step: LaunchedStep
    launched_s: float
    is_saturated: bool
    """Whether it had as much work as the engine's limits allow."""
    may_wait: bool
    """Whether another step may be scheduled and launched before its results are known."""


class Pipeline:
    """Launches batches in order, and gives their results in that order though a device may fail.

    Where a batch fails as a whole its items run alone, so that only the guilty fail: computing an item twice writes
    the same KV. A device that fails every item of a batch, or several steps in a row, is broken: the error goes up
    and ends the engine.

    Invariants:
        What is in flight is noted in its sequences, unless they have been preempted or have ended since.
        Nothing is launched after a step that failed or may not wait before that step has been collected.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, is_asynchronous: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._is_asynchronous = is_asynchronous
        self._in_flight: deque[StepInFlight] = deque()
        self._num_failed_steps = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def launch(self, batch: ScheduledBatch, now: float, is_saturated: bool) -> None:
        """Let the device begin with `batch` once it has done what was launched before."""
        step: LaunchedStep
        may_wait = self._is_asynchronous and not batch.must_be_known_at_once
        try:
            step = self._runner.launch(batch)
        except Exception as error:  # Told by `collect`, in its turn.
            step, may_wait = FailedStep(error), False
        for item in batch.items:
            item.sequence.launched(item.num_tokens, item.samples)
        self._in_flight.append(StepInFlight(batch, step, now, is_saturated, may_wait))

    def due(self, has_launched: bool) -> Iterator[StepInFlight]:
        """The steps to collect now, oldest first: all but one just launched that may wait."""
        while self._in_flight:
            if has_launched and len(self._in_flight) == 1 and self._in_flight[0].may_wait:
                return
            yield self._in_flight.popleft()

    def collect(self, step: StepInFlight) -> list[tuple[ScheduledSequence, ItemResult]]:
        """The results of a step that is due; items whose sequence has gone on without them are left out.

        Raises:
            Exception: the device is broken.
        """
        try:
            results = step.step.collect()
        except Exception as error:
            self._discard()
            return self._collect_alone(step.batch, error)
        self._num_failed_steps = 0
        return list(zip(step.batch.items, results, strict=True))

    def _discard(self) -> None:
        """Forget what was launched after a failed step: it read what that one should have written."""
        for later in self._in_flight:
            with contextlib.suppress(Exception):
                later.step.collect()
            for item in later.batch.items:
                self._scheduler.revoke(item)
        self._in_flight.clear()

    def _collect_alone(self, batch: ScheduledBatch, cause: Exception) -> list[tuple[ScheduledSequence, ItemResult]]:
        self._num_failed_steps += 1
        live = [item for item in batch.items if item.holds_blocks]
        for item in batch.items:
            if not item.holds_blocks:
                self._scheduler.revoke(item)
        results = [self._run_alone(item, cause) for item in live]
        fails_everything = len(results) > 1 and all(result.error is not None for result in results)
        if fails_everything or self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise cause
        return list(zip(live, results, strict=True))

    def _run_alone(self, item: ScheduledSequence, cause: Exception) -> ItemResult:
        try:
            return self._runner.launch(ScheduledBatch((item,))).collect()[0]
        except Exception as error:
            return ItemResult(error=f"{type(error).__name__} while computing the sequence: {error} ({cause})")
