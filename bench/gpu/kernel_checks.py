"""Checks of the Triton kernels against attention by definition, in the sizes of real models."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.model_checks import Check
from replicas.errors import ModelLoadError
from replicas.model.attention.flash import FlashBackend
from replicas.model.attention.interface import AttentionCall, AttentionSpec, Scoring
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.plan import AttentionPlan, ChunkGroup
from replicas.model.attention.select import LONG_SCHEDULE, check_attention
from replicas.model.attention.triton import TritonBackend
from replicas.model.hardware.device import compute_capability
from replicas.model.layers.triton_ops import check_layer_ops
from testkit.model.paged_cases import MIXTURES, TOLERANCES, Case, Chunks, attend_by_definition, largest_error

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = {
    "llama-3.1-8b": Case(heads=(32, 8), sizes=(128, 128), scale=0.09),
    "llama-3.2-1b": Case(heads=(32, 8), sizes=(64, 64), scale=0.125),
    "qwen2.5-0.5b": Case(heads=(14, 2), sizes=(64, 64), scale=0.125),
    "gemma2-9b": Case(heads=(16, 8), sizes=(256, 256), window=200, softcap=50.0, scale=0.0625),
    "gpt-oss-20b": Case(heads=(64, 8), sizes=(64, 64), window=128, has_sinks=True, scale=0.125),
    "deepseek-v3": Case(heads=(16, 16), sizes=(192, 128), scale=0.07),
    "phi-2": Case(heads=(32, 32), sizes=(80, 80), scale=0.11),
    "one-kv-head": Case(heads=(48, 1), sizes=(128, 128), scale=0.09),
    "blocks-of-5": Case(heads=(8, 2), sizes=(96, 96), block_size=5, scale=0.1),
}
IN_EVERY_DTYPE = ("gpt-oss-20b",)
LONG: dict[str, Chunks] = {
    "long decodes": ((8999, 9000), (0, 1), (127, 128), (4000, 4001)),
    "long chunks": ((6000, 6100), (1, 1500)),
}
ALL = {**MIXTURES, **LONG}
# With 0 processors no keys are split into parts, with 132 all that are long enough.
FEW_PROCESSORS, MANY_PROCESSORS = 0, 132


def check_layer(name: str, layer: Case, device: str, mixtures: dict[str, Chunks] = ALL) -> Check:
    """Check one layer over `mixtures`, by default all."""
    started_s = time.perf_counter()
    capability = compute_capability(torch.device(device))
    errors = {
        f"{mixture}, {num_processors} processors": largest_error(
            layer.of(chunks), TritonBackend(num_processors, capability), torch.device(device)
        )
        for mixture, chunks in mixtures.items()
        for num_processors in (FEW_PROCESSORS, MANY_PROCESSORS)
    }
    where, worst = max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    detail = f"largest error {worst:.1e} ({where}), {time.perf_counter() - started_s:.0f} s"
    return Check(f"kernels for {name} in {layer.dtype}", worst < TOLERANCES[layer.dtype], detail)


def check_small_operations(dtype: torch.dtype, device: str) -> Check:
    """Check norms, rotation and gate against plain torch."""
    fault = check_layer_ops(dtype, torch.device(device))
    return Check(f"a layer's small operations in {dtype}", fault is None, fault or "as plain torch")


def check_flash(device: str) -> Check:
    """Check FlashAttention 3; it also passes if it is not installed or not for this device."""
    name = "FlashAttention 3"
    try:
        backend = FlashBackend(BFLOAT16, torch.device(device))
    except ModelLoadError as error:
        return Check(name, True, f"not used: {error}")
    layer = LAYERS["llama-3.1-8b"]
    spec = AttentionSpec([layer.layer], 16, BFLOAT16, torch.device(device))
    fault = check_attention(spec, [backend], LONG_SCHEDULE)
    return Check(name, fault is None, fault or "as plain torch")


def check_captured_graph(name: str) -> Check:
    """Check that a graph captured on one batch of decodes is right after other values are copied in."""
    device = torch.device(name)
    case = Case(heads=(8, 2), sizes=(64, 64), scale=0.125)
    cache = KVCache([case.layer], 64, 16, torch.float32, device)
    for part in (cache[0].keys, cache[0].values):
        part.normal_()
    batch = _Decodes.on(device)
    attention = TritonBackend(MANY_PROCESSORS, compute_capability(device)).planned(
        cache, batch.slots, batch.plan(longest=256)
    )
    call = AttentionCall(
        0, batch.query, batch.query[:, :2], batch.query[:, 2:4], Scoring(case.scale), None, frozenset()
    )
    attention.attend(call)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention.attend(call)
    errors = []
    for positions in ((255, 16, 3, 90), (15, 100, 254, 0)):
        batch.set(positions)
        graph.replay()
        for index, position in enumerate(positions):
            blocks = batch.tables[index].long()
            keys, values = (part[blocks].flatten(0, 1)[: position + 1] for part in (cache[0].keys, cache[0].values))
            expected = attend_by_definition(call.query[index : index + 1], keys, values, call.scoring, None)
            errors.append((output[index : index + 1].double() - expected).abs().amax())
    worst = float(torch.stack(errors).amax())
    return Check("kernels in a captured graph", worst < TOLERANCES[torch.float32], f"largest error {worst:.1e}")


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Four decodes in tensors that outlive a step; sequence i owns blocks 16 i + 1 to 16 i + 16."""

    query: Tensor
    chunks: Tensor
    tables: Tensor
    slots: Tensor

    @classmethod
    def on(cls, device: torch.device) -> _Decodes:
        tables = torch.arange(1, 65, dtype=torch.int32, device=device).view(4, 16)
        chunks = torch.zeros(4, 4, dtype=torch.int32, device=device)
        return cls(
            torch.randn(4, 8, 64, device=device), chunks, tables, torch.zeros(4, dtype=torch.int64, device=device)
        )

    def plan(self, longest: int) -> AttentionPlan:
        return AttentionPlan(ChunkGroup(self.chunks, self.tables, num_tokens=4, longest=longest))

    def set(self, positions: tuple[int, ...]) -> None:
        rows = [[index, position, 1, index] for index, position in enumerate(positions)]
        self.chunks.copy_(torch.tensor(rows, dtype=torch.int32))
        self.slots.copy_(torch.tensor([16 * (1 + 16 * i + p // 16) + p % 16 for i, p in enumerate(positions)]))
