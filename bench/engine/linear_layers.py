"""Times of one linear layer in each format of its weight: `python -m bench.engine.linear_layers --threads 2`.

The layer has Qwen2.5-0.5B's sizes; "torch" is torch's own, without the kernels. Formats take turns, and the least time
of each counts, so that other programs on the machine change little. The layer's weight stays in the processor's cache,
which flatters the large formats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.record import write
from replicas.errors import ModelLoadError
from replicas.model.checkpoint.quantized_linear import QuantizedLinear
from replicas.model.hardware.kernel_build import load_kernels
from replicas.model.layers.linear import CppLinear, GroupedLinear, Int8Linear, pack_groups, rounded_to_int4
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR


def _kept_8_bits(weight: Tensor, bias: None) -> GroupedLinear:
    """Return a layer as of a GGUF file in Q8_0, with random numbers."""
    numbers = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    scales = torch.ones(len(weight), weight.shape[1] // _GROUP)
    return GroupedLinear(pack_groups(QuantizedLinear(numbers, scales, None, 8, 1, _GROUP)), bias, weight.dtype)


def _of_torch(weight: Tensor, bias: None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


_FORMATS: dict[str, Callable[[Tensor, None], nn.Module]] = {
    "torch": _of_torch, "plain": CppLinear, "int8": Int8Linear, "kept 8 bits": _kept_8_bits, "int4": rounded_to_int4,
}  # fmt: skip
_GROUP = 32
_CALLS = 5


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=896)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--name", help="name of the result file; none is written without it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures: dict[str, dict[str, float]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        if not load_kernels(DEFAULT_KERNEL_CACHE_DIR, dtype):
            raise ModelLoadError("the compiled kernels cannot be loaded")
        weight = torch.randn(arguments.outputs, arguments.inputs).to(dtype)
        layers = {name: make(weight, None) for name, make in _FORMATS.items()}
        for rows in arguments.rows:
            inputs = torch.randn(rows, arguments.inputs).to(dtype)
            times = least_times(layers, inputs, arguments.turns)
            case = f"{str(dtype).removeprefix('torch.')}, {rows} rows"
            figures[case] = {name: round(seconds * 1e6, 1) for name, seconds in times.items()}
            print(case, " ".join(f"{name} {micros:.0f} us" for name, micros in figures[case].items()), flush=True)
    if arguments.name:
        print(write(arguments.name, {"threads": arguments.threads, "microseconds": figures}))


def least_times(layers: dict[str, nn.Module], inputs: Tensor, num_turns: int) -> dict[str, float]:
    """Return the least time of a call of each layer, s."""
    times = dict.fromkeys(layers, float("inf"))
    for _ in range(num_turns):
        for name, layer in layers.items():
            layer(inputs)
            for _ in range(_CALLS):
                started_s = time.perf_counter()
                layer(inputs)
                times[name] = min(times[name], time.perf_counter() - started_s)
    return times


if __name__ == "__main__":
    main()
