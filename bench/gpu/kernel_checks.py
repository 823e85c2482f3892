"""Checks of the Triton kernels against attention by definition, in the sizes of real models."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.gpu.model_checks import Check
from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence as EngineSequence
from replicas.errors import ModelLoadError
from replicas.model.attention.flash import FlashBackend
from replicas.model.attention.interface import AttentionCall, AttentionSpec, Scoring
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.plan import AttentionPlan, ChunkGroup
from replicas.model.attention.select import LONG_SCHEDULE, check_attention
from replicas.model.attention.state_cache import StateLayer
from replicas.model.attention.state_select import StateSpec, check_states
from replicas.model.attention.state_triton import TritonStateBackend
from replicas.model.attention.triton import TritonBackend
from replicas.model.attention.two_sided_triton import TritonTwoSided
from replicas.model.batch.inputs import LastRows
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.hardware.device import compute_capability
from replicas.model.hardware.selfcheck import relative_error
from replicas.model.layers.experts import ExpertLayer, Routing
from replicas.model.layers.triton_experts import expert_linear
from replicas.model.layers.triton_ops import check_layer_ops
from replicas.model.sampling.token_counts import CountSlots, TokenCounts, penalize_by_definition
from replicas.model.sampling.triton_draw import check_draw
from replicas.model.sampling.triton_logprobs import check_scores
from replicas.model.sampling.triton_penalties import check_penalties, penalize
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.paged_cases import MIXTURES, TOLERANCES, Case, Chunks, attend_by_definition, largest_error
from testkit.model.two_sided_cases import TwoSidedCase

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = {
    "llama-3.1-8b": Case(heads=(32, 8), sizes=(128, 128), scale=0.09),
    "llama-3.2-1b": Case(heads=(32, 8), sizes=(64, 64), scale=0.125),
    "qwen2.5-0.5b": Case(heads=(14, 2), sizes=(64, 64), scale=0.125),
    "gemma2-9b": Case(heads=(16, 8), sizes=(256, 256), window=200, softcap=50.0, scale=0.0625),
    "gemma4-31b-whole": Case(heads=(32, 4), sizes=(512, 512), scale=0.044),
    "gpt-oss-20b": Case(heads=(64, 8), sizes=(64, 64), window=128, has_sinks=True, scale=0.125),
    "deepseek-v3": Case(heads=(128, 1), sizes=(576, 512), scale=0.07, has_values_in_keys=True),
    "deepseek-v3-expanded": Case(heads=(16, 16), sizes=(192, 128), scale=0.07),
    "phi-2": Case(heads=(32, 32), sizes=(80, 80), scale=0.11),
    "one-kv-head": Case(heads=(48, 1), sizes=(128, 128), scale=0.09),
    "blocks-of-5": Case(heads=(8, 2), sizes=(96, 96), block_size=5, scale=0.1),
}
RELATIVE = {FLOAT32: 1e-5, FLOAT16: 2e-3, BFLOAT16: 2e-2}
IN_EVERY_DTYPE = ("gpt-oss-20b",)
LONG: dict[str, Chunks] = {
    "long decodes": ((8999, 9000), (0, 1), (127, 128), (4000, 4001)),
    "long chunks": ((6000, 6100), (1, 1500)),
}
ALL = {**MIXTURES, **LONG}
COMPILED = {name: ALL[name] for name in ("mixed", "decodes", "long chunks")}
"""Batches that launch all kernels of a layer."""
# Rows of one program of the draw: many are faster in Triton's interpreter.
_INTERPRETED_ROWS = 64
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
    cache = "" if layer.cache_dtype is None else f" with a cache in {layer.cache_dtype}"
    return Check(f"kernels for {name} in {layer.dtype}{cache}", worst < TOLERANCES[layer.dtype], detail)


TWO_SIDED = {
    "bert-base": TwoSidedCase((512, 1, 37), (12, 12), (64, 64)),
    "modernbert-base": TwoSidedCase((900, 5, 130), (12, 12), (64, 64), window=65),
    "embeddinggemma": TwoSidedCase((700, 33), (3, 1), (256, 256), window=257),
    "tiny": TwoSidedCase((5, 40), window=9),
}
"""Whole texts for layers of real models."""


def check_two_sided(name: str, dtype: torch.dtype, device: str) -> Check:
    """Check two-sided attention over several texts."""
    kernel = TritonTwoSided(compute_capability(torch.device(device)))
    error = replace(TWO_SIDED[name], dtype=dtype).largest_error(kernel, torch.device(device))
    return Check(f"two-sided attention of {name} in {dtype}", error < TOLERANCES[dtype], f"largest error {error:.1e}")


STATES = {
    "qwen3.5-0.8b": StateLayer(0, 6144, 4, 16, 16, 128, 128),
    "qwen3.5-4b": StateLayer(0, 8192, 4, 32, 16, 128, 128),
    "nemotron-h-8b": StateLayer(0, 10_240, 4, 128, 8, 128, 64),
    "falcon-h1-7b": StateLayer(0, 3584, 4, 24, 1, 256, 128),
    "lfm2-1.2b": StateLayer(0, 2048, 3),
    "tiny": StateLayer(0, 40, 4, 2, 1, 16, 16),
}
"""Recurrent layers of real models."""


def check_recurrence(name: str, dtype: torch.dtype, device: str) -> Check:
    """Check a recurrent layer's kernels, that of decodes too and that of prompts alone, against plain torch."""
    spec = StateSpec([STATES[name]], 16, dtype, torch.device(device))
    backends = {"decodes": TritonStateBackend(), "one kernel": TritonStateBackend(is_batch_invariant=True)}
    faults = [f"{kind}: {fault}" for kind, one in backends.items() if (fault := check_states(spec, one)) is not None]
    return Check(f"recurrence of {name} in {dtype}", not faults, "; ".join(faults) or "as plain torch")


def check_small_operations(dtype: torch.dtype, device: str) -> Check:
    """Check norms, rotation and gate against plain torch."""
    fault = check_layer_ops(dtype, torch.device(device))
    return Check(f"a layer's small operations in {dtype}", fault is None, fault or "as plain torch")


EXPERTS = {
    "mixtral-8x7b": (8, 2, 4096, 28_672, False),
    "qwen3-30b-a3b": (128, 8, 2048, 1536, False),
    "gpt-oss-20b": (32, 4, 2880, 5760, True),
    "tiny": (6, 2, 40, 48, True),
}
"""Number of experts, experts of a token, sizes of input and output, and whether the weights are transposed."""


@torch.inference_mode()
def check_experts(name: str, dtype: torch.dtype, device: str, num_tokens: Sequence[int]) -> Check:
    """Check the kernel of experts alone against torch's product of each expert."""
    num_experts, top_k, in_size, out_size, is_transposed = EXPERTS[name]
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    sizes = (in_size, out_size) if is_transposed else (out_size, in_size)
    biases = draw(num_experts, out_size) if is_transposed else None
    layer = ExpertLayer(draw(num_experts, *sizes), biases, is_transposed)
    worst = 0.0
    for number in num_tokens:
        inputs = draw(number, in_size)
        index = torch.rand(number, num_experts, generator=generator, device=device).topk(top_k).indices
        routing = Routing.of(index, num_experts)
        expected = _of_experts(inputs, layer, index)
        first = expert_linear(inputs, layer, routing, is_first=True)
        of_pairs = inputs.repeat_interleave(top_k, dim=0)[routing.order]
        second = expert_linear(of_pairs, layer, routing, is_first=False)
        errors = relative_error(first.float(), expected[routing.order]), relative_error(second.float(), expected)
        worst = max(worst, *errors)
    return Check(f"experts of {name} in {dtype}", worst < RELATIVE[dtype], f"largest error {worst:.1e} of a row")


def _of_experts(inputs: Tensor, layer: ExpertLayer, index: Tensor) -> Tensor:
    """Return the product of each pair, [num_pairs, out_size] float32."""
    assert isinstance(layer.weights, Tensor)
    pairs = inputs.repeat_interleave(index.shape[1], dim=0).float()
    output = pairs.new_empty(len(pairs), layer.out_size)
    for expert, weights in enumerate(layer.weights):
        mine = index.flatten() == expert
        product = pairs[mine] @ (weights if layer.is_transposed else weights.t()).float()
        output[mine] = product if layer.biases is None else product + layer.biases[expert].float()
    return output


def check_sampling_kernels(device: str) -> Check:
    """Check the kernels of penalties and masks, of draws, and of log probabilities, each alone."""
    where = torch.device(device)
    found = {
        "penalties": check_penalties(where),
        "draws": check_draw(where, _INTERPRETED_ROWS if device == "cpu" else 1),
        "log probabilities": check_scores(where),
    }
    faults = [f"{name}: {fault}" for name, fault in found.items() if fault is not None]
    return Check("kernels of sampling", not faults, "; ".join(faults) or "as plain torch")


def check_token_counts(device: str) -> Check:
    """Check that counts on the device, some of them of tokens that only it knows, give the host's penalties."""
    vocab_size, num_steps = 1000, 12
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=64, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    found = []
    for where, penalizing in ((torch.device(device), penalize), (torch.device("cpu"), penalize_by_definition)):
        counts, slots = TokenCounts(3, vocab_size, where, penalizing), CountSlots(3, vocab_size)
        sequences = [EngineSequence(GenerateRequest(f"{row}", (row, 5, 5), params), 0.0, None, row) for row in range(3)]
        last_rows = LastRows(BatchColumns.of([ScheduledSequence.of(sequence, 0, 1) for sequence in sequences]))
        tokens = no_tokens(where)
        for step in range(num_steps):
            # The newest token is known to the device alone.
            items = [ScheduledSequence.of(sequence, 2 + step, 1) for sequence in sequences]
            to_device = HostToDeviceBuffer()
            plan = slots.plan(BatchColumns.of(items), last_rows, to_device)
            changed = logits.to(where, copy=True)
            assert plan is not None
            counts.apply(plan, changed, DeviceBuffer.of(to_device.words, tokens))
            for row, sequence in enumerate(sequences):
                if step > 0:
                    sequence.token_ids.append(int(tokens[row]))
            tokens = changed.argmax(dim=-1)
        found.append(changed.cpu())
    error = float((found[0] - found[1]).abs().max())
    return Check("counts of tokens", error < TOLERANCES[FLOAT32], f"largest error {error:.1e} after {num_steps} steps")


def check_flash(device: str) -> Check:
    """Check FlashAttention 3; it also passes if it is not installed or not for this device."""
    name = "FlashAttention 3"
    try:
        backend = FlashBackend(BFLOAT16, torch.device(device))
    except ModelLoadError as error:
        return Check(name, True, f"not used: {error}")
    layer = LAYERS["llama-3.1-8b"]
    spec = AttentionSpec([layer.layer], 16, 512, BFLOAT16, torch.device(device))
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
    planned = TritonBackend(MANY_PROCESSORS, compute_capability(device)).planned
    call = AttentionCall(
        0, batch.query, batch.query[:, :2], batch.query[:, 2:4], Scoring(case.scale), None, frozenset()
    )

    def attend() -> Tensor:
        """Attend by a plan, whose list of work a kernel makes from the lengths: it belongs to the graph."""
        return planned(cache, batch.slots, batch.plan(longest=256)).attend(call)

    attend()  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend()
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
