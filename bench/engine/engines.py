"""Engines over one loaded model, without HTTP and text, and the requests and batches that measurements give them."""

from __future__ import annotations

import argparse
from typing import Any

from replicas.engine.batch import ModelRunner, ScheduledBatch, ScheduledSequence, StateMove
from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.engine.sequence import Sequence
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import KVCacheDtype, ModelOptions, RunnerOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.model.runner import TorchModelRunner
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams
from replicas.timing.clock import Clock

IDENTITY = ReplicaIdentity("bench", "bench", 0)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def model_parser(
    description: str | None, name: str | None, num_threads: int = 2, dtype: str = "auto"
) -> argparse.ArgumentParser:
    """Return a parser of the options of a measurement on one model; `name` is that of its result file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="replicas/demo", help="directory or hub id")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--threads", type=int, default=num_threads)
    parser.add_argument("--name", default=name, help="name of the result file; without one nothing is written")
    return parser


def load_runner(
    options: ModelOptions, limits: EngineLimits, kv_cache_mib: int = 512, kv_cache_dtype: KVCacheDtype = "auto"
) -> TorchModelRunner:
    """Load a model and return its runner, ready for steps within the limits."""
    return warm_runner(load_model(options), limits, RunnerOptions(kv_cache_mib * 2**20, kv_cache_dtype))


def warm_runner(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> TorchModelRunner:
    """Return a runner of a loaded model whose kernels have run."""
    runner = build_runner(loaded, limits, options)
    warm_up(runner, limits)
    return runner


def make_engine(
    runner: TorchModelRunner, *, launcher: ModelRunner | None = None, clock: Clock | None = None, **limits: Any
) -> Engine:
    """Return a fresh engine over a runner; `limits` are fields of `EngineConfig`.

    The prefix cache is off unless `limits` turn it on, so that every run computes the same. Steps go through
    `launcher`, which passes them on to the runner.
    """
    fixed = {
        "num_blocks": runner.num_blocks,
        "num_state_slots": runner.num_state_slots,
        "windows": runner.windows,
        "max_model_len": min(runner.max_model_len, runner.num_blocks // len(runner.windows) * runner.block_size),
        "block_size": runner.block_size,
        "enable_prefix_caching": False,
        "vocab_size": runner.vocab_size,
    }
    config = EngineConfig(**{**fixed, **limits})
    return Engine(config, launcher or runner, lambda _: SilentDecoder(), IDENTITY, clock)


def exact_request(request_id: object, prompt: tuple[int, ...], num_output_tokens: int) -> GenerateRequest:
    """Return a greedy request for exactly `num_output_tokens` tokens: end-of-sequence is ignored."""
    params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(str(request_id), prompt, params)


def pseudo_random_tokens(number: int, num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that differs from those of other numbers."""
    return tuple((number + 7 * position) % 500 for position in range(num_tokens))


def decode_batch(
    runner: TorchModelRunner, num_seqs: int, context: int, params: SamplingParams = GREEDY
) -> ScheduledBatch:
    """Return a batch of sequences with `context` tokens each, of which they compute the last."""
    return ScheduledBatch(tuple(_item(runner, number, context, context - 1, params) for number in range(num_seqs)))


def prefill_batch(runner: TorchModelRunner, num_tokens: int) -> ScheduledBatch:
    """Return a batch of one whole prompt."""
    return ScheduledBatch((_item(runner, 0, num_tokens, 0, GREEDY),))


def _item(
    runner: TorchModelRunner, number: int, num_tokens: int, start: int, params: SamplingParams
) -> ScheduledSequence:
    """Return a sequence that computes its tokens from `start` on; it owns its blocks unless the KV cache is small.

    So are its two slots for recurrent state, if the model has any. The step writes the second one at a boundary.
    """
    request = GenerateRequest(f"row-{number}", pseudo_random_tokens(number, num_tokens), params)
    sequence = Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=number)
    num_blocks = -(-num_tokens // runner.block_size)
    sequence.block_table = [1 + (number * num_blocks + index) % runner.num_blocks for index in range(num_blocks)]
    is_within = start // runner.block_size == num_tokens // runner.block_size
    source, other = (1 + (2 * number + index) % max(2, runner.num_state_slots) for index in range(2))
    move = StateMove(source, source if is_within else other)
    return ScheduledSequence.of(sequence, start, num_tokens - start, move)
