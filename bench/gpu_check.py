"""Correctness of the model and step times on this CUDA device: `make gpu-check`.

Needs only torch and transformers: no network, no test framework. Without a CUDA device it fails.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from bench.engines import GREEDY
from bench.gpu.device_time import measure_decode, measure_prefill
from bench.gpu.model_checks import (
    AHEAD_ARCHITECTURES,
    ARCHITECTURES,
    Check,
    check_ahead,
    check_architecture,
    check_sampler,
)
from bench.models import LLAMA_1B, random_model
from bench.record import RESULTS, write
from replicas.engine.config import EngineLimits
from replicas.model.build import build_runner
from replicas.model.loading.options import Device, RunnerOptions
from replicas.protocol import SamplingParams

COMPILED_ARCHITECTURES = ("gemma2-window", "gpt_oss-window", "qwen3_moe")


def run_checks(device: Device) -> dict[str, object]:
    """Run all checks and return their outcomes; print each as soon as it is known."""
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
    return {"checks": [asdict(check) for check in checks], "all_passed": all(check.passed for check in checks)}


def run_steps(device: str) -> dict[str, object]:
    """Measure step times of a random model of Llama-3.2-1B's shape in bfloat16."""
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048)
    runner = build_runner(random_model(LLAMA_1B, torch.bfloat16, device), limits, RunnerOptions())
    seeded = SamplingParams(max_tokens=8, top_p=0.95)
    print(f"\nLlama-3.2-1B shape, bfloat16, {runner.num_blocks} KV blocks of {runner.block_size}")
    times = [measure_decode(runner, num_seqs, 1024, GREEDY) for num_seqs in (1, 8, 32, 64)]
    times += [measure_decode(runner, 32, 4096, GREEDY), measure_decode(runner, 32, 1024, seeded)]
    times += [measure_prefill(runner, num_tokens) for num_tokens in (512, 2048)]
    for step in times:
        print(
            f"{step.step:20} {step.min_ms:8.2f} ms min {step.median_ms:8.2f} median {step.tokens_per_s:10.0f} tokens/s"
        )
    return {"steps": [asdict(step) for step in times]}


def run_decodes(device: str) -> dict[str, object]:
    """Return the device's bandwidth in bytes per second, and decodes of three models' shapes as shares of it."""
    from bench.gpu.kernel_times import copy_bandwidth, measure_decodes

    bandwidth = copy_bandwidth(torch.device(device))
    print(f"\nDecodes against a bandwidth of {bandwidth / 1e12:.2f} TB/s, bfloat16")
    decodes = [asdict(decode) for decode in measure_decodes(device, bandwidth)]
    return {"copy_bytes_per_s": bandwidth, "decodes": decodes}


def run_host_gap(device: str) -> dict[str, object]:
    """Return gaps between decodes with and without graphs and async scheduling, and a mixed trace on three engines."""
    from bench.gpu.host_gap import run
    from bench.gpu.mixed_trace import plain_model

    print("\nDecodes of Llama-3.2-1B's shape in bfloat16: what the device waits for the host")
    return run(
        lambda: random_model(LLAMA_1B, torch.bfloat16, device), lambda: plain_model(LLAMA_1B, torch.bfloat16, device)
    )


PARTS: dict[str, Callable[[Device], dict[str, object]]] = {
    "checks": run_checks,
    "steps": run_steps,
    "decodes": run_decodes,
    "host_gap": run_host_gap,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, writing the figures after each; return non-zero if a check failed or there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_check.json")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 1
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    figures: dict[str, object] = {"device": torch.cuda.get_device_name()}
    for part in parts:
        started_s = time.monotonic()
        figures |= PARTS[part]("cuda")
        gc.collect()  # frees this part's device memory for the next one
        path = write(str(options.output.absolute().with_suffix("")), figures)
        print(f"{part} took {time.monotonic() - started_s:.0f} s; written to {path}", flush=True)
    return 0 if figures.get("all_passed", True) else 1


if __name__ == "__main__":
    sys.exit(main())
