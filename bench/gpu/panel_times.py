"""Linear layers whose weights have 4 or 8 bits, beside those in 16 bits: right in the sizes of a model, and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.model_checks import Check
from replicas.model.checkpoint.quantized_linear import FP4_VALUES, QuantizedLinear
from replicas.model.hardware.selfcheck import TOLERANCES, relative_error
from replicas.model.layers.experts import ExpertLayer, ExpertLinear, PanelExpertLinear, Routing
from replicas.model.layers.float8_linear import Float8Linear, check_float8
from replicas.model.layers.linear import plain_linear
from replicas.model.layers.panels import PanelLinear, Panels, pack_panels, panel_linear
from replicas.model.layers.triton_experts import expert_linear
from replicas.model.layers.triton_panels import TritonPanels, check_panels

FORMS = {
    "int4 by 128": (4, 128), "int8 by row": (8, None), "fp8 by row": (8, None), "fp8 by 128": (8, 128),
    "fp4 by 32": (4, 32),
}  # fmt: skip
"""Bits of a number, and inputs of a scale."""
LAYER = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of the products of a layer of Llama-3.1-8B."""
TINY, FLOAT8_TINY = {"small": (72, 96)}, {"small": (80, 96)}
EXPERTS = {
    "gpt-oss-20b": ("fp4 by 32", 32, 4, ((5760, 2880), (2880, 2880))),
    "qwen3-30b-a3b": ("fp8 by 128", 128, 8, ((1536, 2048), (2048, 768))),
}
"""Form of the weights, experts, experts of a token, and outputs and inputs of both layers."""
TINY_EXPERTS = {"small": ("fp4 by 32", 3, 2, ((72, 96), (96, 80)))}
TOKENS = (1, 64, 2048)
ROWS = (1, 16, 32, 64, 128, 256, 512, 2048)
_COPIES, _ROUNDS = 4, 20


@dataclass(frozen=True, slots=True)
class PanelTime:
    """Time of all products of a layer, in microseconds."""

    form: str
    rows: str
    us: float
    bfloat16_us: float


def panel_weight(form: str, shape: tuple[int, int], device: torch.device, seed: int) -> QuantizedLinear:
    """Return a random weight."""
    bits, group = FORMS[form]
    generator = torch.Generator(device).manual_seed(seed)
    group = min(group or shape[1], shape[1])
    numbers = torch.randint(0, 2**bits, shape, generator=generator, device=device, dtype=torch.uint8)
    scales = torch.rand(shape[0], -(-shape[1] // group), generator=generator, device=device) / 100 + 0.001
    if form.startswith("fp8"):
        return QuantizedLinear((numbers & 0xF7).view(torch.float8_e4m3fn), scales, None, 8, inputs_per_scale=group)
    if bits == 8:
        return QuantizedLinear(numbers.view(torch.int8), scales, None, 8, inputs_per_scale=group)
    if form.startswith("fp4"):
        table = torch.tensor(FP4_VALUES, device=device)
        return QuantizedLinear(numbers, scales.bfloat16(), None, 4, inputs_per_scale=group, table=table)
    zero_points = torch.full_like(scales, 8, dtype=torch.uint8)
    return QuantizedLinear(numbers, scales, zero_points, 4, inputs_per_scale=group)


@torch.inference_mode()
def check_panel_products(form: str, dtype: torch.dtype, device: str, *, is_tiny: bool) -> Check:
    """Check a layer's products against those of the widened weights, and rows alone against the same among others."""
    place = torch.device(device)
    worst, fault = 0.0, check_panels(dtype, place)
    for shape in (TINY if is_tiny else LAYER).values():
        layer = _layer(form, shape, dtype, place)
        alone = _layer(form, shape, dtype, place, is_batch_invariant=True)
        rows = torch.randn(300, shape[1], device=place).to(dtype)
        expected = functional.linear(rows.float(), layer.weight.float())
        for number in (1, 16, 33, 64, 200, 300):
            worst = max(worst, relative_error(layer(rows[:number]).float(), expected[:number]))
        if not torch.equal(alone(rows[7:8])[0], alone(rows[:70])[7]):
            fault = "a row depends on the others of its batch"
    detail = fault or f"largest error {worst:.1e} of a row"
    return Check(f"{form} in {dtype}", fault is None and worst < TOLERANCES[dtype], detail)


@torch.inference_mode()
def measure_panels(device: str, *, is_tiny: bool) -> list[PanelTime]:
    """Time the products of a layer, each round over several copies of its weights, which no cache holds together."""
    place, dtype = torch.device(device), torch.float32 if is_tiny else torch.bfloat16
    shapes, copies = (TINY, 1) if is_tiny else (LAYER, _COPIES)
    times = []
    for form in FORMS:
        layers = [_layer(form, shape, dtype, place, seed) for seed in range(copies) for shape in shapes.values()]
        dense = [plain_linear(layer.weight, None) for layer in layers]
        for number in ROWS[:2] if is_tiny else ROWS:
            inputs = {size: torch.randn(number, size, device=place).to(dtype) for _, size in shapes.values()}
            kept = _us(_products(layers, inputs), place) / copies
            wide = _us(_products(dense, inputs), place) / copies
            times.append(PanelTime(form, f"{number} rows", kept, wide))
    return times


@torch.inference_mode()
def measure_float8(device: str, *, is_tiny: bool) -> list[PanelTime]:
    """Time the products of a layer whose inputs are rounded, too, as `measure_panels` does."""
    place, dtype = torch.device(device), torch.float32 if is_tiny else torch.bfloat16
    shapes, copies = (FLOAT8_TINY, 1) if is_tiny else (LAYER, _COPIES)
    weights = [torch.randn(shape, device=place).to(dtype) for _ in range(copies) for shape in shapes.values()]
    layers = [Float8Linear(weight, None, TritonPanels(place).round_rows) for weight in weights]
    dense = [plain_linear(weight, None) for weight in weights]
    times = []
    for number in ROWS[:2] if is_tiny else ROWS:
        inputs = {size: torch.randn(number, size, device=place).to(dtype) for _, size in shapes.values()}
        rounded, wide = (_us(_products(each, inputs), place) / copies for each in (layers, dense))
        times.append(PanelTime("fp8_w8a8", f"{number} rows", rounded, wide))
    return times


@torch.inference_mode()
def check_float8_products(dtype: torch.dtype, device: str) -> Check:
    """Check products of rounded rows, as a replica with `quantization=fp8_w8a8` does when it starts."""
    fault = check_float8(TritonPanels(torch.device(device)).round_rows, dtype, torch.device(device))
    return Check(f"fp8_w8a8 in {dtype}", fault is None, fault or "as by the definition")


@torch.inference_mode()
def check_kept_experts(name: str, dtype: torch.dtype, device: str, *, is_tiny: bool) -> Check:
    """Check the products of experts in panels against those of the kernel for dense weights."""
    form, num_experts, top_k, sizes = (TINY_EXPERTS if is_tiny else EXPERTS)[name]
    place, worst = torch.device(device), 0.0
    products = TritonPanels(place)
    for shape in sizes:
        panels, dense = _experts(form, num_experts, shape, dtype, place)
        for num_tokens in (1, 7) if is_tiny else (1, 64, 700):
            routing = _routing(num_tokens, num_experts, top_k, place)
            rows = torch.randn(num_tokens, shape[1], device=place).to(dtype)
            found = PanelExpertLinear(products)(rows, panels, routing, is_first=True)
            expected = expert_linear(rows, dense, routing, is_first=True)
            worst = max(worst, relative_error(found.float(), expected.float()))
    return Check(f"experts of {name} in {form}", worst < TOLERANCES[dtype], f"largest error {worst:.1e} of a row")


@torch.inference_mode()
def measure_experts(device: str, *, is_tiny: bool) -> list[PanelTime]:
    """Time both layers of experts in panels beside dense ones. All weights are larger than the cache."""
    place, dtype = torch.device(device), torch.float32 if is_tiny else torch.bfloat16
    kept_linear, times = PanelExpertLinear(TritonPanels(place)), []
    for name, (form, num_experts, top_k, sizes) in (TINY_EXPERTS if is_tiny else EXPERTS).items():
        layers = [_experts(form, num_experts, shape, dtype, place) for shape in sizes]
        for num_tokens in TOKENS[:1] if is_tiny else TOKENS:
            routing = _routing(num_tokens, num_experts, top_k, place)
            rows = {shape[1]: torch.randn(num_tokens, shape[1], device=place).to(dtype) for shape in sizes}
            kept = _us(partial(_run_experts, kept_linear, [kept for kept, _ in layers], rows, routing), place)
            wide = _us(partial(_run_experts, expert_linear, [dense for _, dense in layers], rows, routing), place)
            times.append(PanelTime(f"experts of {name}", f"{num_tokens} tokens", kept, wide))
    return times


def _run_experts(
    linear: ExpertLinear, layers: Sequence[ExpertLayer], rows: Mapping[int, Tensor], routing: Routing
) -> list[Tensor]:
    return [linear(rows[layer.in_size], layer, routing, is_first=True) for layer in layers]


def _experts(
    form: str, num_experts: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[ExpertLayer, ExpertLayer]:
    """Return a layer of random experts in panels, and the same in dense weights."""
    products = TritonPanels(device)
    experts = [pack_panels(panel_weight(form, shape, device, seed)) for seed in range(num_experts)]
    dense = torch.stack([products.widen(panels, dtype) for panels in experts])
    return ExpertLayer(Panels.stack(experts), None, False), ExpertLayer(dense, None, False)


def _routing(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Routing:
    generator = torch.Generator(device).manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    return Routing.of(scores.topk(top_k).indices, num_experts)


def _products(layers: Sequence[Any], inputs: Mapping[int, Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [layer(inputs[layer.in_features]) for layer in layers]


def _layer(
    form: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seed: int = 0,
    *, is_batch_invariant: bool = False,
) -> PanelLinear:  # fmt: skip
    products = TritonPanels(device, is_batch_invariant=is_batch_invariant)
    return panel_linear(products, panel_weight(form, shape, device, seed), None, dtype)


def _us(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a run in microseconds; on a GPU of its replay in a graph."""
    run()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return _replay_us(graph)
    start_s = perf_counter()
    run()
    return (perf_counter() - start_s) * 1e6


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(median(times))
