"""Pipeline of the steps in flight on the device."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.engine.batch import (
    CollectedStep,
    ItemResult,
    LaunchedStep,
    ModelRunner,
    ScheduledBatch,
    ScheduledStep,
    StepResults,
)
from replicas.engine.bisection import Bisection
from replicas.engine.config import EngineConfig
from replicas.engine.scheduler import Scheduler
from replicas.timing.clock import Clock


@dataclass(frozen=True, slots=True)
class _FailedStep:
    """Step that could not be launched."""

    error: Exception

    def sample(self) -> None:
        """Do nothing: there is no step."""

    def collect(self) -> StepResults:
        """Raise the error of the launch."""
        raise self.error


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """Launched step whose results have not been collected."""

    scheduled: ScheduledStep
    launched: LaunchedStep
    may_wait: bool
    """True if another step may be scheduled and launched before the results of this one are known."""


class Pipeline:
    """Pipeline of steps: launches batches in order and returns their results in that order, even if the device fails.

    If a batch fails as a whole, `Bisection` repeats it in parts, so that only the items at fault fail. If the device is
    broken, the error is raised and ends the engine.

    Invariants:
        Tokens in flight are noted in their sequences, unless a sequence has been preempted or has ended since.
        After a step that failed or may not wait, no step is launched until that step has been collected.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, clock: Clock, config: EngineConfig) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._is_asynchronous = config.async_scheduling
        self._counts_on_device = config.counts_on_device
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_collected_s = float("-inf")
        self._bisection = Bisection(self._run_alone, config.block_size)
        self.num_repeats = 0
        """Number of forward passes that repeated a part of a failed step. Any thread may read it."""

    def __len__(self) -> int:
        return len(self._in_flight)

    def run(self, step: ScheduledStep | None) -> Iterator[CollectedStep]:
        """Launch `step`; return an iterator that collects the steps that are due, oldest first.

        All steps in flight are due, except the one just launched if it may wait. The caller applies the results of each
        step before it asks for the next: a failed step is repeated with its sequences' latest tokens.

        Raises:
            Exception: raised by the iterator if the device is broken.
        """
        if step is not None:
            self._launch(step)
        return self._collect_due(has_launched=step is not None)

    def _launch(self, step: ScheduledStep) -> None:
        """Launch the step on the device, behind the steps launched before."""
        launched: LaunchedStep
        may_wait = self._is_asynchronous and not step.batch.needs_sync(self._counts_on_device)
        try:
            launched = self._runner.launch(step.batch)
        except Exception as error:  # Raised later, when the step is collected, so that results stay in launch order.
            launched, may_wait = _FailedStep(error), False
        self._scheduler.launched(step.batch)
        self._in_flight.append(_StepInFlight(step, launched, may_wait))

    def _collect_due(self, has_launched: bool) -> Iterator[CollectedStep]:
        while self._in_flight:
            if has_launched and len(self._in_flight) == 1:
                self._sample()
                if self._in_flight[0].may_wait:
                    return
            yield self._collect(self._in_flight.popleft())

    def _sample(self) -> None:
        """Launch the rest of the only step in flight. All tokens before it are known now."""
        step = self._in_flight[0]
        try:
            step.launched.sample()
        except Exception as error:  # Raised when the step is collected, as an error of its launch.
            self._in_flight[0] = _StepInFlight(step.scheduled, _FailedStep(error), may_wait=False)

    def _collect(self, step: _StepInFlight) -> CollectedStep:
        scheduled = step.scheduled
        computed, results = self._results(scheduled.batch, step.launched)
        now = self._clock.monotonic()
        duration_s = now - max(scheduled.begun_s, self._last_collected_s)
        self._last_collected_s = now
        return CollectedStep(scheduled.batch, computed, results, now, duration_s, scheduled.is_saturated)

    def _results(self, batch: ScheduledBatch, launched: LaunchedStep) -> tuple[ScheduledBatch, StepResults]:
        """Return the results of a step, and the items that they belong to."""
        try:
            results = launched.collect()
        except Exception as error:
            self._discard()
            return self._repeat(batch, error)
        assert len(results) == len(batch)
        self._bisection.succeeded(batch)
        return batch, results

    def _discard(self) -> None:
        """Drop all steps launched after a failed step, since they read KV that the failed step should have written."""
        for later in self._in_flight:
            with contextlib.suppress(Exception):
                later.launched.collect()
            for item in later.scheduled.batch.items:
                self._scheduler.revoke(item)
        self._in_flight.clear()

    def _repeat(self, batch: ScheduledBatch, cause: Exception) -> tuple[ScheduledBatch, StepResults]:
        live = tuple(item for item in batch.items if item.holds_blocks)
        for item in batch.items:
            if not item.holds_blocks:
                self._scheduler.revoke(item)
        return ScheduledBatch(live), StepResults.of(self._bisection.repeat(live, cause))

    def _run_alone(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Run a batch and wait for it, while no step is in flight."""
        self.num_repeats += 1
        step = self._runner.launch(batch)
        step.sample()
        return list(step.collect())
