"""Correctness of the model and step times on this CUDA device: `make gpu-check`.

Needs only torch and transformers: no network, no test framework. Without a CUDA device it fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from bench.gpu.ahead_checks import ARCHITECTURES as AHEAD_ARCHITECTURES
from bench.gpu.ahead_checks import check_ahead
from bench.gpu.check import Check
from bench.models import LLAMA_1B, random_model
from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.config import EngineLimits
from replicas.engine.sequence import Sequence
from replicas.model.attention.select import choose_attention
from replicas.model.build import build_runner
from replicas.model.loading.options import Device, RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.sampler import Sampler
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    random_prompts,
    reference_model,
    reference_tokens,
    sample,
    tokens,
)
from testkit.model.tiny_checkpoints import write_checkpoint

ARCHITECTURES = (
    "llama",
    "mistral-window",
    "qwen3",
    "gemma2-window",
    "gemma3_text-window",
    "gpt2",
    "phi3",
    "qwen3_moe",
    "gpt_oss-window",
    "deepseek_v3",
)
COMPILED_ARCHITECTURES = ("gemma2-window", "gpt_oss-window", "qwen3_moe")
# Two logits this close may swap between two orders of summation in float32.
NEAR_TIE = 1e-3
NUM_ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of one kind of step, over `NUM_ITERATIONS` repetitions."""

    step: str
    num_tokens: int
    min_ms: float
    median_ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.num_tokens / self.median_ms


def check_architecture(
    architecture: str, device: Device, attention: str = "auto", *, compile_layers: bool = False
) -> Check:
    """Check that batched and chunked float32 output on `device` equals transformers' `generate()` there."""
    prompts = random_prompts((5, 33, 60, 90))
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        reference = reference_model(path).to(device)
        expected = reference_tokens(reference, prompts, max_tokens=24)
        loaded = load(path, device=device, compile_layers=compile_layers)
        engine = build_engine(loaded, Sizes(), choose_attention(loaded.attention_spec(Sizes().block_size), attention))
        outputs = tokens(engine, prompts, SamplingParams(max_tokens=24, temperature=0.0))
    gaps = []
    for prompt, output, other in zip(prompts, outputs, expected, strict=True):
        index = next((i for i in range(len(other)) if output[i] != other[i]), None)
        if index is not None:
            known = torch.tensor([[*prompt, *other[:index]]], device=device)
            with torch.inference_mode():
                logits = reference(known).logits[0, -1]
            gaps.append(abs(float(logits[output[index]] - logits[other[index]])))
    detail = f"{len(gaps)} first differences" + (f", largest gap {max(gaps):.1e}" if gaps else "")
    layers = "compiled layers" if compile_layers else "layers as served"
    name = f"{architecture} equals generate(), attention by {attention}, {layers}"
    return Check(name, all(gap < NEAR_TIE for gap in gaps), detail)


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
    sampler = Sampler(frozenset({2}))
    on_cpu = [result.token_id for result in sample(sampler, logits, sequences)]
    on_device = [result.token_id for result in sample(sampler, logits.to(device), sequences)]
    num_different = sum(one != other for one, other in zip(on_cpu, on_device, strict=True))
    return Check("sampler equals the CPU's", num_different == 0, f"{num_different} of {len(sequences)} rows differ")


def measure_decode(runner: TorchModelRunner, num_seqs: int, context: int, params: SamplingParams) -> StepTime:
    """Measure a step of one token for each of `num_seqs` sequences with `context` tokens."""
    items = []
    for number in range(num_seqs):
        sequence = _sequence(number, context, params)
        num_blocks = -(-context // runner.block_size)
        sequence.block_table = [1 + (number * num_blocks + i) % runner.num_blocks for i in range(num_blocks)]
        items.append(ScheduledSequence(sequence, context - 1, 1))
    batch = ScheduledBatch(tuple(items))
    return _time(f"decode {num_seqs} x {context}", num_seqs, lambda: runner.execute(batch))


def measure_prefill(runner: TorchModelRunner, num_tokens: int) -> StepTime:
    """Measure a step of a whole prompt of `num_tokens` tokens."""
    sequence = _sequence(0, num_tokens, SamplingParams(max_tokens=8, temperature=0.0))
    sequence.block_table = list(range(1, 1 + -(-num_tokens // runner.block_size)))
    batch = ScheduledBatch((ScheduledSequence(sequence, 0, num_tokens),))
    return _time(f"prefill {num_tokens}", num_tokens, lambda: runner.execute(batch))


def run_checks(device: Device) -> list[Check]:
    """Run all checks; print each as soon as it is known."""
    from bench.gpu.kernel_checks import check_flash, kernel_checks  # Triton comes only with torch for CUDA

    runs: list[Callable[[str], Check]] = [
        *kernel_checks(),
        *(partial(check_architecture, name, attention="triton") for name in ARCHITECTURES),
        partial(check_architecture, ARCHITECTURES[0], attention="gather"),
        partial(check_architecture, "gemma2-window", attention="triton", compile_layers=True),
        check_sampler,
        *(partial(check_ahead, name) for name in AHEAD_ARCHITECTURES),
        *(partial(check_ahead, name, compile_layers=True) for name in COMPILED_ARCHITECTURES),
        check_flash,  # last: it may end the process
    ]
    checks: list[Check] = []
    for run in runs:
        try:
            checks.append(run(device))
        except Exception as error:  # an error in one check must not hide the others
            checks.append(Check(str(run), False, f"{type(error).__name__}: {error}"))
        print(f"{'ok  ' if checks[-1].passed else 'FAIL'}  {checks[-1].name}: {checks[-1].detail}", flush=True)
    return checks


def run_benchmark(device: str) -> list[StepTime]:
    """Measure step times of a random model of Llama-3.2-1B's shape in bfloat16."""
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048)
    runner = build_runner(random_model(LLAMA_1B, torch.bfloat16, device), limits, RunnerOptions())
    greedy, seeded = SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, top_p=0.95)
    print(f"\nLlama-3.2-1B shape, bfloat16, {runner.num_blocks} KV blocks of {runner.block_size}")
    times = [measure_decode(runner, num_seqs, 1024, greedy) for num_seqs in (1, 8, 32, 64)]
    times += [measure_decode(runner, 32, 4096, greedy), measure_decode(runner, 32, 1024, seeded)]
    times += [measure_prefill(runner, num_tokens) for num_tokens in (512, 2048)]
    for step in times:
        print(
            f"{step.step:20} {step.min_ms:8.2f} ms min {step.median_ms:8.2f} median {step.tokens_per_s:10.0f} tokens/s"
        )
    return times


def run_decodes(device: str) -> tuple[float, list[dict[str, object]]]:
    """Return the device's bandwidth in bytes per second, and decodes of three models' shapes as shares of it."""
    from bench.gpu.kernel_times import copy_bandwidth, measure_decodes

    bandwidth = copy_bandwidth(torch.device(device))
    print(f"\nDecodes against a bandwidth of {bandwidth / 1e12:.2f} TB/s, bfloat16")
    return bandwidth, [asdict(decode) for decode in measure_decodes(random_model, _decode_ms, device, bandwidth)]


def run_host_gap(device: str) -> dict[str, object]:
    """Return gaps between decodes with and without graphs and async scheduling, and a mixed trace on three engines."""
    from bench.gpu.host_gap import run
    from bench.gpu.mixed_trace import plain_model

    print("\nDecodes of Llama-3.2-1B's shape in bfloat16: what the device waits for the host")
    return run(
        lambda: random_model(LLAMA_1B, torch.bfloat16, device), lambda: plain_model(LLAMA_1B, torch.bfloat16, device)
    )


PARTS: dict[str, Callable[[Device], dict[str, object]]] = {
    "checks": lambda device: _as_figures(run_checks(device)),
    "steps": lambda device: {
        "steps": [{**asdict(step), "tokens_per_s": step.tokens_per_s} for step in run_benchmark(device)]
    },
    "decodes": lambda device: dict(zip(("copy_bytes_per_s", "decodes"), run_decodes(device), strict=True)),
    "host_gap": run_host_gap,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_check.json")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas")
    options = parser.parse_args(arguments)
    parts, output = options.parts.split(","), options.output
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 1
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    figures: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        started_s = time.monotonic()
        figures |= PARTS[part]("cuda")
        gc.collect()  # frees this part's device memory for the next one
        output.write_text(json.dumps(figures, indent=2) + "\n")
        print(f"{part} took {time.monotonic() - started_s:.0f} s; written to {output}", flush=True)
    return 0 if figures.get("all_passed", True) else 1


def _as_figures(checks: list[Check]) -> dict[str, object]:
    return {"checks": [asdict(check) for check in checks], "all_passed": all(check.passed for check in checks)}


def _decode_ms(runner: TorchModelRunner, num_seqs: int, context: int) -> float:
    return measure_decode(runner, num_seqs, context, SamplingParams(max_tokens=8, temperature=0.0)).median_ms


def _sequence(number: int, num_tokens: int, params: SamplingParams) -> Sequence:
    prompt = tuple((number + 7 * position) % 500 for position in range(num_tokens))
    return Sequence(
        GenerateRequest(f"row-{number}", prompt, params), arrival_s=0.0, deadline_s=None, arrival_index=number
    )


def _time(step: str, num_tokens: int, execute: Callable[[], object]) -> StepTime:
    """Time `execute`, which returns once its tokens are on the host, so wall time covers the whole step."""
    durations = []
    for _ in range(NUM_ITERATIONS + 3):
        started_s = time.perf_counter()
        execute()
        durations.append(1000 * (time.perf_counter() - started_s))
    return StepTime(step, num_tokens, min(durations[3:]), statistics.median(durations[3:]))


if __name__ == "__main__":
    sys.exit(main())
