"""Requests of mixed lengths, all at once: Headway, transformers' continuous batching and its `generate()`.

The weights are random, so every sequence runs to its requested length. `generate()` gets left-padded batches in order
of arrival, each run to its longest request: the waste is part of the method.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from bench.engine.engines import make_engine, warm_runner
from bench.peers.engine import Events, PeerRequest, mixed_requests
from bench.peers.headway_engine import run_engine
from bench.peers.transformers_batching import ContinuousBatching
from bench.peers.transformers_generate import StaticGenerate
from replicas.engine.config import EngineLimits
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.runner import TorchModelRunner

CONCURRENCY = 64
_LIMITS = EngineLimits(max_num_seqs=CONCURRENCY, max_num_batched_tokens=2048)


@dataclass(frozen=True, slots=True)
class TraceOutcome:
    """Result of one engine."""

    engine: str
    num_output_tokens: int
    duration_s: float
    tokens_per_s: float
    fault: str | None = None
    """Reason why it could not be measured."""

    def describe(self) -> str:
        """Return one line of text."""
        if self.fault is not None:
            return f"{self.engine:36} {self.fault}"
        return f"{self.engine:36} {self.tokens_per_s:8.0f} output tokens/s, {self.duration_s:6.2f} s"


def measure_trace(make_model: Callable[[], LoadedModel], make_peer: Callable[[], Any]) -> list[TraceOutcome]:
    """Measure the engines one after another, each alone on the device; a failure is recorded as `fault`."""
    trace = mixed_requests(256, longest_prompt=768, longest_output=512)
    return [*_measure_headway(make_model, trace), *_measure_peers(make_peer, trace)]


def _measure_headway(make_model: Callable[[], LoadedModel], trace: list[PeerRequest]) -> list[TraceOutcome]:
    runner = warm_runner(make_model(), _LIMITS, RunnerOptions(gpu_memory_utilization=0.5))
    serve_headway(runner, trace[:CONCURRENCY], is_async=True)
    return [
        _timed("headway, in turn", trace, lambda: serve_headway(runner, trace, is_async=False)),
        _timed("headway, a step ahead", trace, lambda: serve_headway(runner, trace, is_async=True)),
    ]


def _measure_peers(make_peer: Callable[[], Any], trace: list[PeerRequest]) -> list[TraceOutcome]:
    gc.collect()
    torch.cuda.empty_cache()
    model = make_peer()
    continuous = ContinuousBatching(model, max_batch_tokens=_LIMITS.max_num_batched_tokens)
    static = StaticGenerate(model, CONCURRENCY)
    outcomes = [_timed("transformers continuous batching", trace, lambda: continuous.run(trace, CONCURRENCY))]
    continuous.close()
    return [*outcomes, _timed("transformers generate(), static", trace, lambda: static.run(trace, CONCURRENCY))]


def plain_model(config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    """Return a model with random weights in plain transformers."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def serve_headway(runner: TorchModelRunner, trace: list[PeerRequest], is_async: bool) -> Events:
    """Run the trace on Headway's engine, without text."""
    engine = make_engine(
        runner,
        max_num_seqs=CONCURRENCY,
        max_num_batched_tokens=_LIMITS.max_num_batched_tokens,
        async_scheduling=is_async,
    )
    events = run_engine(engine, trace)
    assert all(len(events.token_s[request.number]) == request.num_output_tokens for request in trace)
    return events


def _timed(engine: str, trace: list[PeerRequest], serve: Callable[[], Events]) -> TraceOutcome:
    num_tokens = sum(request.num_output_tokens for request in trace)
    started_s = time.perf_counter()
    try:
        serve()
    except Exception as error:  # third-party code on an unknown device: the other results still count
        outcome = TraceOutcome(engine, 0, 0.0, 0.0, f"{type(error).__name__}: {error}")
    else:
        duration_s = time.perf_counter() - started_s
        outcome = TraceOutcome(engine, num_tokens, duration_s, num_tokens / duration_s)
    print(outcome.describe(), flush=True)
    return outcome
