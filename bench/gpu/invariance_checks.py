"""Checks of `batch_invariant` on the device: the bits of a sequence do not depend on what shares its steps."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

import torch

from bench.engine.engines import make_engine
from bench.gpu.model_checks import Check
from replicas.engine.config import EngineLimits
from replicas.model.attention.triton import TritonBackend
from replicas.model.build import build_runner
from replicas.model.hardware.device import compute_capability
from replicas.model.layers.batch_invariant import check_products
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import Device, Dtype, ModelOptions, RunnerOptions
from replicas.protocol import GenerateRequest, SamplingParams, TokenDelta
from testkit.model.engine_runs import random_prompts, run
from testkit.model.paged_cases import Case, attention_outputs
from testkit.model.tiny_checkpoints import write_checkpoint

_PART_KEYS = 64
_STARTS = (0, 1, 63, 64, 100, 128, 250, 511)
_PARAMS = (
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=24, seed=4, logprobs=1),
    SamplingParams(max_tokens=24, top_p=0.9, top_k=50, seed=5, prompt_logprobs=1),
)
_LENGTHS = (5, 33, 60, 90, 17, 48, 71, 25, 9, 55)


def check_rows(dtype: torch.dtype, device: Device) -> Check:
    """Check that products and sums of a row are the same alone and among others."""
    fault = check_products(dtype, torch.device(device))
    return Check(f"batch-invariant products in {dtype}", fault is None, fault or "a row has the same bits")


def check_invariant_attention(name: str, layer: Case, device: Device, num_batches: int = 20) -> Check:
    """Check that a token's attention has the same bits in every chunk and batch."""
    where, rng = torch.device(device), random.Random(0)
    backend = TritonBackend(132, compute_capability(where), part_keys=_PART_KEYS)
    length = _STARTS[-1] + 41
    (expected,) = attention_outputs(layer.of(((0, length),)), backend, where)
    num_different = 0
    for _ in range(num_batches):
        chunks = [(start, start + rng.choice([1, 1, 2, 17, 40])) for start in rng.choices(_STARTS, k=rng.randint(1, 6))]
        first = attention_outputs(layer.of(tuple(chunks)), backend, where)[0]
        num_different += not torch.equal(first, expected[chunks[0][0] : chunks[0][1]])
    detail = f"{num_different} of {num_batches} batches change a sequence's bits"
    return Check(f"batch-invariant attention for {name} in {layer.dtype}", num_different == 0, detail)


def check_alone(architecture: str, device: Device, dtype: Dtype) -> Check:
    """Check that requests have the same tokens alone and together, in graphs and a step ahead, and preempted."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        loaded = load_model(
            ModelOptions(str(path), dtype=dtype, device=device, kernel_cache_dir=None, batch_invariant=True)
        )
    options = RunnerOptions(kv_cache_bytes=2**22, gpu_memory_utilization=0.4)
    runner = build_runner(loaded, EngineLimits(max_num_seqs=8, max_num_batched_tokens=48), options)
    requests = [
        GenerateRequest(f"request-{number}", prompt, _PARAMS[number % len(_PARAMS)])
        for number, prompt in enumerate(random_prompts(_LENGTHS))
    ]
    # Few blocks: the invariants, which are checked after each step, cover all of them.
    alone_engine = partial(
        make_engine, runner, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=200,
        num_blocks=min(64, runner.num_blocks),
    )  # fmt: skip
    alone = [run(alone_engine(), [request])[0] for request in requests]
    engine = make_engine(
        runner,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        num_blocks=min(24, runner.num_blocks),  # so few that some are preempted
        enable_prefix_caching=True,
        async_scheduling=device == "cuda",
    )
    together = run(engine, requests)
    has_bits = device == "cuda"  # On a CPU the tokens are promised.
    num_different = sum(
        _seen(one, has_bits) != _seen(other, has_bits) for one, other in zip(alone, together, strict=True)
    )
    detail = f"{num_different} of {len(requests)} requests differ"
    return Check(f"{architecture} in {dtype}, alone and among others", num_different == 0, detail)


def _seen(output: TokenDelta, has_bits: bool) -> tuple[object, ...]:
    scores = (output.logprobs, output.prompt_logprobs) if has_bits else ()
    return (output.error, output.token_ids, *scores)
