"""Duration of a decode step on CPU, for each way to compute the model, measured in one process.

The models are those of bench/engine/models.py. Models and ways take turns within a round, so that a disturbance hits
them all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.engine.engines import decode_batch, prefill_batch
from bench.engine.models import SHAPES, model_directory, with_paged_attention
from bench.record import write
from replicas.engine.batch import ScheduledBatch
from replicas.engine.config import EngineLimits
from replicas.model.attention.interface import ATTENTION_NAME, register_attention
from replicas.model.build import build_runner
from replicas.model.hardware.kernel_build import load_kernels
from replicas.model.layers.linear import choose_linears, replace_linears
from replicas.model.layers.optimize import cpu_modules, optimize_model
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR, RunnerOptions
from replicas.model.runner import TorchModelRunner


@dataclass(frozen=True, slots=True)
class Figure:
    """Duration of one kind of step."""

    way: str
    step: str
    min_ms: float
    median_ms: float
    min_cpu_ms: float
    """CPU time of the process, over all threads. On a busy machine, with one thread, it is steadier than wall time."""
    num_repetitions: int


def _leave(loaded: LoadedModel) -> LoadedModel:
    """Return the model with transformers' own modules."""
    return loaded


def _pack(loaded: LoadedModel) -> LoadedModel:
    """Return the model with transformers' own modules and packed linear layers."""
    replace_linears(loaded.model, choose_linears(loaded.dtype, False, "none"))
    return loaded


def _optimize(loaded: LoadedModel, has_kernels: bool, quantization: str = "none") -> LoadedModel:
    """Return the model as a replica runs it, with or without a compiler."""
    if has_kernels and not load_kernels(DEFAULT_KERNEL_CACHE_DIR, loaded.dtype):
        raise SystemExit("the kernels cannot be compiled here")
    optimize_model(loaded.model, loaded.port, loaded.layers, cpu_modules(loaded.dtype, has_kernels, quantization))
    return replace(loaded, has_kernels=has_kernels)


WAYS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "plain": _leave,
    "packed": _pack,
    "fused": partial(_optimize, has_kernels=False),
    "compiled": partial(_optimize, has_kernels=True),
    "int8": partial(_optimize, has_kernels=True, quantization="int8"),
}


def build(directory: Path, dtype: torch.dtype, way: str) -> TorchModelRunner:
    """Return a runner over a model, computed in the given way."""
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    loaded = WAYS[way](with_paged_attention(model, dtype, torch.device("cpu")))
    return build_runner(loaded, EngineLimits(), RunnerOptions(kv_cache_bytes=1 << 30))


def measure(
    runners: dict[str, TorchModelRunner], steps: dict[str, Callable[[TorchModelRunner], ScheduledBatch]], seconds: float
) -> list[Figure]:
    """Measure each step for about `seconds` in each way."""
    figures = []
    for step, batch_for in steps.items():
        batches = {way: batch_for(runner) for way, runner in runners.items()}
        times_ms: dict[str, list[float]] = {way: [] for way in runners}
        cpu_ms: dict[str, list[float]] = {way: [] for way in runners}
        end_s = time.perf_counter() + seconds * len(runners)
        while time.perf_counter() < end_s or len(times_ms[next(iter(runners))]) < 4:
            for way, runner in runners.items():
                started_s, started_cpu_s = time.perf_counter(), time.process_time()
                runner.execute(batches[way])
                times_ms[way].append((time.perf_counter() - started_s) * 1e3)
                cpu_ms[way].append((time.process_time() - started_cpu_s) * 1e3)
        for way, values in times_ms.items():
            kept = values[1:]  # the first warms up
            best_ms, median_ms, best_cpu_ms = min(kept), statistics.median(kept), min(cpu_ms[way][1:])
            figure = Figure(way, step, round(best_ms, 3), round(median_ms, 3), round(best_cpu_ms, 3), len(kept))
            figures.append(figure)
            print(f"{step:>14} {way:>11}: min {figure.min_ms:7.2f} ms, median {figure.median_ms:7.2f} ms, "
                  f"CPU {figure.min_cpu_ms:7.2f} ms", flush=True)  # fmt: skip
    return figures


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="S", help=f"shapes that take turns, of {', '.join(SHAPES)}")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "headway-models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--batches", default="1,4,16,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=0, help="also a whole prompt of this many tokens")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds for each step and way")
    parser.add_argument("--name", help="name of the result in bench/results; none: nothing is written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shapes = arguments.shape.split(",")
    runners = {
        f"{shape} {way}" if len(shapes) > 1 else way: build(
            model_directory(arguments.models, shape), getattr(torch, arguments.dtype), way
        )
        for shape in shapes
        for way in arguments.ways.split(",")
    }
    steps: dict[str, Callable[[TorchModelRunner], ScheduledBatch]] = {
        f"{size} x {arguments.context}": partial(decode_batch, num_seqs=int(size), context=arguments.context)
        for size in arguments.batches.split(",")
    }
    if arguments.prefill:
        steps[f"prefill {arguments.prefill}"] = partial(prefill_batch, num_tokens=arguments.prefill)
    figures = measure(runners, steps, arguments.seconds)
    if arguments.name:
        options = {**vars(arguments), "models": str(arguments.models)}
        print(write(arguments.name, {**options, "steps": [asdict(figure) for figure in figures]}))


if __name__ == "__main__":
    main()
