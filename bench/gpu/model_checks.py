"""Checks of whole models: against transformers, against the CPU, and of steps that are launched ahead."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.engine.engines import make_engine
from bench.gpu.device_time import num_graphs, release
from replicas.engine.config import EngineLimits
from replicas.engine.sequence import Sequence
from replicas.model.attention.select import choose_attention
from replicas.model.attention.state_select import choose_states
from replicas.model.build import build_runner
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import Device, RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams
from testkit.model.engine_runs import (
    Prompt,
    Sizes,
    build_engine,
    load,
    random_prompts,
    reference_model,
    reference_tokens,
    run,
    sample,
    tokens,
)
from testkit.model.rank_threads import following, load_parts
from testkit.model.recorded_steps import num_changed_steps, record
from testkit.model.tiny_checkpoints import write_checkpoint

ARCHITECTURES = (
    "llama",
    "mistral-window",
    "qwen3",
    "gemma2-window",
    "gemma3_text-window",
    "gemma4_text-window",
    "gpt2",
    "phi3",
    "qwen3_moe",
    "gpt_oss-window",
    "deepseek_v3",
    "qwen3_5_text-16",
    "nemotron_h",
    "lfm2",
)
# In compiled layers, experts keep torch's grouped matrix product, which waits for the device except in bfloat16 on
# compute capability 9.0 and 10.0: such float32 steps cannot be captured.
NOT_CAPTURED_COMPILED = ("gpt_oss-window", "qwen3_moe", "deepseek_v3")
AHEAD_ARCHITECTURES = (
    "llama",
    "mistral-window",
    "gemma2-window",
    "gpt_oss-window",
    "gemma4_text-window",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_5_text-16",
    "nemotron_h",
)
REPLAYED_ARCHITECTURES = ("llama", "gemma2-window")
# Two logits this close may swap between two orders of summation in float32.
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class _Work:
    """Sequences that run together, and the limits of their steps."""

    limits: EngineLimits
    lengths: tuple[int, ...]
    """Tokens of the prompts."""
    num_blocks: int


_SMALL = _Work(
    EngineLimits(max_num_seqs=12, max_num_batched_tokens=70),
    (5, 33, 60, 90, 17, 48, 71, 25, 9, 55, 40, 12, 66, 81),
    num_blocks=60,  # so few that some are preempted
)
_LARGE = _Work(
    EngineLimits(max_num_seqs=128, max_num_batched_tokens=2048),
    tuple(1 + 31 * number % 150 for number in range(300)),
    num_blocks=900,
)
"""Steps with prompts of all captured sizes."""
_PARAMS = (
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=32, seed=3),
    SamplingParams(max_tokens=36, top_p=0.9, top_k=50, seed=4, logprobs=2),
    SamplingParams(max_tokens=28, temperature=0.0, stop_token_ids=tuple(range(100, 140))),
    SamplingParams(
        max_tokens=24, seed=5, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=(LogitBias(9, 2.0),)
    ),
)


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check on the device."""

    name: str
    passed: bool
    detail: str


def check_architecture(
    architecture: str, device: Device, attention: str = "auto", *, compile_layers: bool = False
) -> Check:
    """Check that batched and chunked float32 output on `device` equals transformers' `generate()` there."""
    prompts, sizes = random_prompts((5, 33, 60, 90)), Sizes(num_blocks=128, gives_back=True)
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        reference = reference_model(path).to(device)
        expected = reference_tokens(reference, prompts, max_tokens=24)
        loaded = load(path, device=device, compile_layers=compile_layers)
        loaded.port.recurrent.backend = choose_states(loaded.state_spec(sizes.block_size))
        engine = build_engine(loaded, sizes, choose_attention(loaded.attention_spec(sizes.block_size), attention))
        outputs = tokens(engine, prompts, SamplingParams(max_tokens=24, temperature=0.0))
    gaps = _gaps(reference, prompts, outputs, expected)
    layers = "compiled layers" if compile_layers else "layers as served"
    name = f"{architecture} equals generate(), attention by {attention}, {layers}"
    return Check(name, *_verdict(gaps))


def check_sampler(device: str) -> Check:
    """Check that every kind of row draws the same token on `device` as on the CPU."""
    kinds = [
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=8, top_p=0.9),
        SamplingParams(max_tokens=8, top_k=40, min_p=0.02),
        SamplingParams(max_tokens=8, temperature=1.5, top_p=0.99, min_p=0.001),
        SamplingParams(max_tokens=8, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=(LogitBias(9, 4.0),)),
    ]
    sequences = [
        Sequence(GenerateRequest(f"row-{row}", (row, 9, 9), kinds[row % len(kinds)]), 0.0, None, row)
        for row in range(20 * len(kinds))
    ]
    logits = torch.randn(len(sequences), 32_000, generator=torch.Generator().manual_seed(0)) * 3
    on_cpu, on_device = (
        [result.token_id for result in sample(some, sequences, frozenset({2}))] for some in (logits, logits.to(device))
    )
    num_different = _num_unequal(on_cpu, on_device)
    return Check("sampler equals the CPU's", num_different == 0, f"{num_different} of {len(sequences)} rows differ")


def check_ahead(architecture: str, device: Device, *, compile_layers: bool = False, is_large: bool = False) -> Check:
    """Compare sequences of every kind in float32: graphs and async scheduling against plain steps.

    If `is_large`, there are steps of up to 2,048 tokens.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        loaded = load(path, device=device, compile_layers=compile_layers)
        work = _LARGE if is_large else _SMALL
        plain, _ = _run(loaded, work, is_ahead=False)
        ahead, num_captured = _run(loaded, work, is_ahead=True)
    num_different = _num_unequal(plain, ahead)
    layers = "with compiled layers, " if compile_layers else "large steps, " if is_large else ""
    may_be_eager = loaded.device.type != "cuda" or (compile_layers and architecture in NOT_CAPTURED_COMPILED)
    return Check(
        f"{architecture}, {layers}a step ahead and in graphs equals plain steps",
        num_different == 0 and (num_captured > 0 or may_be_eager),
        f"{num_different} of {len(plain)} sequences differ, {num_captured} graphs",
    )


def check_threads(device: Device) -> Check:
    """Check that a runner whose graphs one thread has captured computes the same in another, after the first's end."""
    with tempfile.TemporaryDirectory() as directory:
        loaded = load(write_checkpoint(Path(directory), "llama", with_tokenizer=False), device=device)
        plain, _ = _run(loaded, _SMALL, is_ahead=False)
        with ThreadPoolExecutor(1) as building:
            runner = building.submit(_runner, loaded, _SMALL, is_ahead=True).result()
        with ThreadPoolExecutor(1) as running:
            ahead = running.submit(_outputs, runner, _SMALL, is_ahead=True).result()
    num_different = _num_unequal(plain, ahead)
    detail = f"{num_different} of {len(plain)} sequences differ, {num_graphs(runner)} graphs"
    return Check("built in one thread, run in another", num_different == 0, detail)


def check_replay(architecture: str, device: Device) -> Check:
    """Check that the messages of steps ahead, in graphs, give the same bits on a second runner of the same weights."""
    with tempfile.TemporaryDirectory() as directory:
        loaded = load(write_checkpoint(Path(directory), architecture, with_tokenizer=False), device=device)
        runner = _runner(loaded, _SMALL, is_ahead=True)
        steps = record(runner)
        _outputs(runner, _SMALL, is_ahead=True)
        del runner
        release()
        num_faults = num_changed_steps(_runner(loaded, _SMALL, is_ahead=True), steps)
    detail = f"{num_faults} of {len(steps)} steps differ"
    return Check(f"{architecture}, recorded messages on a second runner", num_faults == 0 and len(steps) > 0, detail)


def check_rank_in_graphs(architecture: str, device: Device) -> Check:
    """Check that the only rank of a group, whose collectives are captured, computes the same as a whole model."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        plain, _ = _run(load(path, device=device), _SMALL, is_ahead=False)
        [part] = load_parts(path, 1, device)
        ahead, num_captured = _run(part, _SMALL, is_ahead=True)
    num_different = _num_unequal(plain, ahead)
    return Check(
        f"{architecture}, collectives of one rank in graphs",
        num_different == 0 and (num_captured > 0 or device == "cpu"),
        f"{num_different} of {len(plain)} sequences differ, {num_captured} graphs",
    )


def check_two_ranks(architecture: str, device: Device) -> Check:
    """Check that the tokens of two ranks on the same device, joined by gloo, are those of `generate()` there."""
    prompts = random_prompts((5, 33, 60, 90))
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        reference = reference_model(path).to(device)
        expected = reference_tokens(reference, prompts, max_tokens=24)
        with following(load_parts(path, 2, device)) as ranks:
            outputs = tokens(ranks.engine(), prompts, SamplingParams(max_tokens=24, temperature=0.0))
    verdict = _verdict(_gaps(reference, prompts, outputs, expected))
    return Check(f"{architecture}, two ranks on one device equal generate()", *verdict)


def _gaps(
    reference: PreTrainedModel, prompts: Items[Prompt], outputs: Items[list[int]], expected: Items[list[int]]
) -> list[float]:
    """Return the gaps between the reference's logits of the tokens where an output first differs from the expected."""
    gaps = []
    for prompt, output, other in zip(prompts, outputs, expected, strict=True):
        index = next((i for i in range(len(other)) if output[i] != other[i]), None)
        if index is not None:
            known = torch.tensor([[*prompt, *other[:index]]], device=reference.device)
            with torch.inference_mode():
                logits = reference(known).logits[0, -1]
            gaps.append(abs(float(logits[output[index]] - logits[other[index]])))
    return gaps


def _verdict(gaps: list[float]) -> tuple[bool, str]:
    detail = f"{len(gaps)} first differences" + (f", largest gap {max(gaps):.1e}" if gaps else "")
    return all(gap < NEAR_TIE for gap in gaps), detail


def _num_unequal(some: Items[object], others: Items[object]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


def _run(loaded: LoadedModel, work: _Work, *, is_ahead: bool) -> tuple[list[tuple[int, ...]], int]:
    """Return each sequence's tokens, and the number of captured graphs."""
    runner = _runner(loaded, work, is_ahead=is_ahead)
    return _outputs(runner, work, is_ahead=is_ahead), num_graphs(runner)


def _runner(loaded: LoadedModel, work: _Work, *, is_ahead: bool) -> TorchModelRunner:
    options = RunnerOptions(kv_cache_bytes=2**25, gpu_memory_utilization=0.4, enforce_eager=not is_ahead)
    return build_runner(loaded, work.limits, options)


def _outputs(runner: TorchModelRunner, work: _Work, *, is_ahead: bool) -> list[tuple[int, ...]]:
    """Return each sequence's tokens."""
    engine = make_engine(
        runner,
        num_blocks=min(work.num_blocks, runner.num_blocks),
        max_model_len=200,
        max_num_seqs=work.limits.max_num_seqs,
        max_num_batched_tokens=work.limits.max_num_batched_tokens,
        enable_prefix_caching=True,
        async_scheduling=is_ahead,
    )
    requests = [
        GenerateRequest(f"request-{number}", prompt, _PARAMS[number % len(_PARAMS)])
        for number, prompt in enumerate(random_prompts(work.lengths))
    ]
    return [output.token_ids for output in run(engine, requests)]
