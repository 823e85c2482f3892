"""Static and continuous batching on one engine: the same model, kernels, KV cache and step limits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.baselines.timeline import Timeline
from bench.baselines.trace import TraceRequest
from replicas.engine.engine import Engine
from replicas.protocol import Band, GenerateRequest, SamplingParams

TokenTimes = dict[int, list[float]]
"""Arrival times of each request's output tokens, by request number."""

_PADDING_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Totals of an engine's steps."""

    num_steps: int
    num_tokens: int
    mean_utilization: float
    """Mean share of the slots that computed in a step."""


class EngineBatches:
    """Engine that takes requests of a batch or of a trace and records token times."""

    def __init__(self, engine: Engine, timeline: Timeline) -> None:
        self._engine = engine
        self._timeline = timeline
        self._ids = itertools.count()
        self._times: dict[str, list[float]] = {}

    @property
    def has_work(self) -> bool:
        """True if a request has not ended."""
        return self._engine.has_work

    def add(self, prompt: tuple[int, ...], num_output_tokens: int, band: Band) -> list[float]:
        """Continue a prompt by exactly `num_output_tokens` tokens; return the list that their times are appended to."""
        request_id = str(next(self._ids))
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(GenerateRequest(request_id, prompt, params, band))
        self._times[request_id] = []
        return self._times[request_id]

    def step(self) -> None:
        """Run one step of the engine."""
        deltas = self._engine.step()
        now = self._timeline.clock()
        for delta in deltas:
            assert delta.error is None, delta.error
            self._times[delta.request_id] += [now] * len(delta.token_ids)

    def figures(self) -> StepFigures:
        """Return the totals so far."""
        histograms = {histogram.name: histogram for histogram in self._engine.metrics().histograms}
        tokens = histograms["vllm:iteration_tokens_total"]
        utilization = histograms["headway:batch_utilization"]
        num_steps = sum(tokens.counts)
        return StepFigures(num_steps, round(tokens.sum), utilization.sum / max(1, num_steps))


class RaggedBatches:
    """Batch without padding: the slot of an ended sequence computes nothing and idles until the longest ends."""

    def __init__(self, engine: EngineBatches) -> None:
        self._engine = engine

    def run(self, batch: Sequence[TraceRequest]) -> TokenTimes:
        """Run `batch` to the end of its longest request."""
        times = {r.number: self._engine.add(r.prompt, r.num_output_tokens, Band.STANDARD) for r in batch}
        while self._engine.has_work:
            self._engine.step()
        return times


class PaddedBatches:
    """Rectangular batch: prompts padded to the longest, and every row computed until the longest output has ended.

    Padding tokens stand before the prompt and are computed like any token, at the same cost as masked ones. Padding
    changes the token values, not their number or times.
    """

    def __init__(self, engine: EngineBatches) -> None:
        self._engine = engine

    def run(self, batch: Sequence[TraceRequest]) -> TokenTimes:
        """Run `batch` to the end of its longest request; drop the tokens that a row computes after its own end."""
        width = max(len(request.prompt) for request in batch)
        num_output_tokens = max(request.num_output_tokens for request in batch)
        times: TokenTimes = {}
        for request in batch:
            padding = (_PADDING_TOKEN_ID,) * (width - len(request.prompt))
            times[request.number] = self._engine.add(padding + request.prompt, num_output_tokens, Band.STANDARD)
        while self._engine.has_work:
            self._engine.step()
        return {request.number: times[request.number][: request.num_output_tokens] for request in batch}
