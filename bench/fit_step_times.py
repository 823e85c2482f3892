"""Fit of a step-time function to a real model's steps: `python -m bench.fit_step_times`.

Runs batches of many shapes (decodes at several contexts, prefill chunks, both together) in shuffled rounds and takes
each shape's median. Fits seconds = base + a decodes + b prefill tokens + c context tokens by least squares on relative
errors, no term negative. The result file is a value for `step_times=` of `bench.timed_app`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from bench.record import write
from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.config import EngineLimits
from replicas.engine.sequence import Sequence
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.engine.timed_runner import StepShape, StepTimes, shape_of

DECODES = (0, 1, 2, 4, 8, 16, 24, 32)
CONTEXTS = (32, 256, 1024)
PREFILLS = (0, 16, 64, 128, 256, 448)


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape and the median duration of its step."""

    shape: StepShape
    median_s: float


def make_batch(num_decodes: int, context: int, num_prefill_tokens: int, block_size: int) -> ScheduledBatch:
    """Return a batch of decodes at `context` tokens and one prefill from the start; sequences may share blocks."""
    items = []
    for number in range(num_decodes):
        sequence = _sequence(number, context, block_size)
        items.append(ScheduledSequence(sequence, context - 1, 1))
    if num_prefill_tokens:
        items.append(ScheduledSequence(_sequence(num_decodes, num_prefill_tokens, block_size), 0, num_prefill_tokens))
    return ScheduledBatch(tuple(items))


def measure(runner: TorchModelRunner, num_rounds: int, max_model_len: int) -> list[Measured]:
    """Return the median of every shape over rounds, each with the shapes in random order."""
    shapes = [
        make_batch(num_decodes, context, num_prefill_tokens, runner.block_size)
        for num_decodes, context, num_prefill_tokens in itertools.product(DECODES, CONTEXTS, PREFILLS)
        if num_decodes + num_prefill_tokens > 0 and context < max_model_len and (num_decodes or context == CONTEXTS[0])
    ]
    seconds: list[list[float]] = [[] for _ in shapes]
    for round_number in range(num_rounds + 1):
        for index in random.Random(round_number).sample(range(len(shapes)), len(shapes)):
            started_s = time.perf_counter()
            runner.execute(shapes[index])
            if round_number > 0:  # the first round warms up
                seconds[index].append(time.perf_counter() - started_s)
    return [Measured(shape_of(batch), statistics.median(times)) for batch, times in zip(shapes, seconds, strict=True)]


def fit(measured: list[Measured]) -> StepTimes:
    """Fit by least squares on relative errors; a negative term is left out and the rest fitted again."""
    rows = np.array(
        [[1, m.shape.num_decodes, m.shape.num_prefill_tokens, m.shape.num_context_tokens] for m in measured], float
    )
    seconds = np.array([m.median_s for m in measured])
    used = [0, 1, 2, 3]
    while True:
        solution, *_ = np.linalg.lstsq(rows[:, used] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        if (solution >= 0).all():
            break
        used.pop(int(np.argmin(solution)))
    terms = dict(zip(used, map(float, solution), strict=True))
    return StepTimes(*(terms.get(index, 0.0) for index in range(4)))


def relative_errors(step_times: StepTimes, measured: list[Measured]) -> list[float]:
    """Return |fitted - measured| / measured of every shape."""
    return [abs(step_times.of(m.shape) - m.median_s) / m.median_s for m in measured]


def main() -> None:
    """Measure, fit, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="replicas/demo", help="directory or hub id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", default="step_times", help="name of the result in bench/results")
    arguments = parser.parse_args()
    loaded = load_model(ModelOptions(arguments.model, arguments.dtype, arguments.device, None, arguments.threads))
    limits = EngineLimits()
    runner = build_runner(loaded, limits, RunnerOptions(kv_cache_bytes=128 * 2**20))
    warm_up(runner, limits)
    measured = measure(runner, arguments.rounds, loaded.max_model_len)
    step_times = fit(measured)
    errors = relative_errors(step_times, measured)
    print(f"base {step_times.base_s * 1e3:.3f} ms, decode {step_times.per_decode_s * 1e3:.4f} ms, "
          f"prefill token {step_times.per_prefill_token_s * 1e3:.4f} ms, "
          f"context token {step_times.per_context_token_s * 1e6:.4f} us")  # fmt: skip
    print(f"{len(measured)} shapes; relative error median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    command = f"python -m bench.fit_step_times --model {arguments.model} --dtype {arguments.dtype}"
    figures = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "step_times": step_times.as_dict(),
        "relative_error_median": statistics.median(errors),
        "relative_error_worst": max(errors),
        "shapes": [{**asdict(m.shape), "median_s": m.median_s} for m in measured],
    }
    print(write(arguments.name, f"{command} --threads {arguments.threads} --rounds {arguments.rounds}", figures))


def _sequence(number: int, num_tokens: int, block_size: int) -> Sequence:
    prompt = tuple(16 + (31 * number + 7 * position) % 4000 for position in range(num_tokens))
    request = GenerateRequest(f"row-{number}", prompt, SamplingParams(max_tokens=8, temperature=0.0))
    sequence = Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=number)
    num_blocks = -(-num_tokens // block_size)
    sequence.block_table = [1 + number * num_blocks + index for index in range(num_blocks)]
    return sequence


if __name__ == "__main__":
    main()
