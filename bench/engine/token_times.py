"""Arrival times of an engine's tokens, in real or simulated time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from replicas.engine.engine import Engine
from replicas.protocol import Band, GenerateRequest, SamplingParams

TokenTimes = dict[int, list[float]]
"""Arrival times of each request's output tokens, by request number."""

_SHORTEST_SLEEP_S = 1e-4


@dataclass(frozen=True, slots=True)
class Timeline:
    """Time of a run: a clock with an arbitrary origin, and a sleep that advances it."""

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s` or a little later; at least a short time passes."""
        self.sleep(max(_SHORTEST_SLEEP_S, moment_s - self.clock()))


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Totals of an engine's steps."""

    num_steps: int
    num_tokens: int
    mean_utilization: float
    """Mean share of the slots that computed in a step."""


@dataclass(slots=True)
class TimedEngine:
    """Engine that takes requests one by one and records the times of their tokens."""

    engine: Engine
    timeline: Timeline
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        """True if a request has not ended."""
        return self.engine.has_work

    def add(self, prompt: tuple[int, ...], num_output_tokens: int, band: Band = Band.STANDARD) -> list[float]:
        """Continue a prompt by exactly `num_output_tokens` tokens; return the list that their times are appended to."""
        request_id = str(next(self._ids))
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(GenerateRequest(request_id, prompt, params, band))
        self._times[request_id] = []
        return self._times[request_id]

    def step(self) -> None:
        """Run one step of the engine."""
        deltas = self.engine.step()
        now = self.timeline.clock()
        for delta in deltas:
            assert delta.error is None, delta.error
            self._times[delta.request_id] += [now] * len(delta.token_ids)

    def finish(self) -> None:
        """Run steps until every request has ended."""
        while self.has_work:
            self.step()

    def figures(self) -> StepFigures:
        """Return the totals so far."""
        histograms = {histogram.name: histogram for histogram in self.engine.metrics().histograms}
        tokens = histograms["vllm:iteration_tokens_total"]
        utilization = histograms["headway:batch_utilization"]
        num_steps = sum(tokens.counts)
        return StepFigures(num_steps, round(tokens.sum), utilization.sum / max(1, num_steps))
