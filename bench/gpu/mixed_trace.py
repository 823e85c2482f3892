"""Requests of mixed lengths, all at once: Headway, transformers' continuous batching and its `generate()`.

The weights are random, so every sequence runs to its requested length. `generate()` gets left-padded batches in order
of arrival, each run to its longest request: the waste is part of the method.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.loader import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.model.runner import TorchModelRunner
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams

NUM_REQUESTS, CONCURRENCY = 256, 64
_PROMPT_TOKENS, _OUTPUT_TOKENS = (32, 768), (16, 512)
_MAX_MODEL_LEN, _MAX_BATCHED_TOKENS = 2048, 2048


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt and the number of its output tokens."""

    prompt: tuple[int, ...]
    num_output_tokens: int


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


def make_trace(num_requests: int = NUM_REQUESTS, seed: int = 0) -> list[TraceRequest]:
    """Return requests with lengths drawn uniformly from their ranges; the same for every engine."""
    rng = random.Random(seed)
    lengths = [(rng.randint(*_PROMPT_TOKENS), rng.randint(*_OUTPUT_TOKENS)) for _ in range(num_requests)]
    return [TraceRequest(tuple(rng.randrange(259, 8000) for _ in range(prompt)), out) for prompt, out in lengths]


def measure_trace(make_model: Callable[[], LoadedModel], make_peer: Callable[[], Any]) -> list[TraceOutcome]:
    """Measure the engines one after another, each alone on the device; a failure is recorded as `fault`."""
    trace = make_trace()
    return [*_measure_ours(make_model, trace), *_measure_peers(make_peer, trace)]


def _measure_ours(make_model: Callable[[], LoadedModel], trace: Sequence[TraceRequest]) -> list[TraceOutcome]:
    runner = _build(make_model())
    serve_headway(runner, trace[:CONCURRENCY], is_async=True)
    return [
        _timed("headway, in turn", trace, lambda: serve_headway(runner, trace, is_async=False)),
        _timed("headway, a step ahead", trace, lambda: serve_headway(runner, trace, is_async=True)),
    ]


def _measure_peers(make_peer: Callable[[], Any], trace: Sequence[TraceRequest]) -> list[TraceOutcome]:
    gc.collect()
    torch.cuda.empty_cache()
    model = make_peer()
    return [
        _timed("transformers continuous batching", trace, lambda: serve_continuous(model, trace)),
        _timed("transformers generate(), static", trace, lambda: serve_static(model, trace)),
    ]


def plain_model(config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    """Return a model with random weights in plain transformers."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def serve_headway(runner: TorchModelRunner, trace: Sequence[TraceRequest], is_async: bool) -> None:
    """Run the trace on Headway's engine, without text."""
    config = EngineConfig(
        num_blocks=runner.num_blocks,
        max_model_len=min(_MAX_MODEL_LEN, runner.max_model_len),
        block_size=runner.block_size,
        max_num_seqs=CONCURRENCY,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        enable_prefix_caching=False,
        async_scheduling=is_async,
    )
    engine = Engine(config, runner, lambda _: SilentDecoder(), ReplicaIdentity("bench", "bench", 0))
    for number, request in enumerate(trace):
        params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(str(number), request.prompt, params))
    num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    assert num_tokens == sum(request.num_output_tokens for request in trace)


def serve_continuous(model: Any, trace: Sequence[TraceRequest]) -> None:
    """Run the trace on transformers' own continuous batching."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=512, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            max_requests_per_batch=CONCURRENCY, max_batch_tokens=_MAX_BATCHED_TOKENS, allow_block_sharing=False
        ),
    )
    manager.start()
    try:
        for number, request in enumerate(trace):
            manager.add_request(
                list(request.prompt), request_id=str(number), max_new_tokens=request.num_output_tokens, eos_token_id=-1
            )
        num_finished = 0
        while num_finished < len(trace):
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("the manager has ended")
            elif output.is_finished():
                if output.error:
                    raise RuntimeError(output.error)
                num_finished += 1
    finally:
        manager.stop(block=True, timeout=10)


@torch.inference_mode()
def serve_static(model: Any, trace: Sequence[TraceRequest]) -> None:
    """Run the trace in padded batches, each to its longest request."""
    for first in range(0, len(trace), CONCURRENCY):
        batch = trace[first : first + CONCURRENCY]
        ids, mask = left_padded([request.prompt for request in batch])
        num_steps = max(request.num_output_tokens for request in batch)
        output = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=num_steps, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert output.shape == (len(batch), ids.shape[1] + num_steps)


def left_padded(prompts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, each [num_prompts, longest] int64."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)


def _build(loaded: LoadedModel) -> TorchModelRunner:
    limits = EngineLimits(max_num_seqs=CONCURRENCY, max_num_batched_tokens=_MAX_BATCHED_TOKENS)
    runner = build_runner(loaded, limits, RunnerOptions(gpu_memory_utilization=0.5))
    warm_up(runner, limits)
    return runner


def _timed(engine: str, trace: Sequence[TraceRequest], serve: Callable[[], None]) -> TraceOutcome:
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
