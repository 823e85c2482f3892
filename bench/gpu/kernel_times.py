"""Decode times against the limit of the device's memory bandwidth: whole steps, and attention alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig, Qwen2Config

from bench.engine.engines import GREEDY
from bench.engine.models import LLAMA_1B, LLAMA_8B, random_model
from bench.gpu.device_time import NUM_ITERATIONS, measure_decode, median_ms, release
from replicas.engine.batch import BatchColumns, ScheduledSequence, StateMove
from replicas.engine.config import EngineLimits
from replicas.engine.sequence import Sequence as EngineSequence
from replicas.model.attention.interface import AttentionCall, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache, bytes_per_block
from replicas.model.attention.plan import AttentionPlan, ChunkGroup
from replicas.model.attention.state_cache import StateCache, StateLayer
from replicas.model.attention.state_select import computed, state_calls
from replicas.model.attention.state_triton import TritonStateBackend
from replicas.model.attention.triton import TritonBackend
from replicas.model.batch.inputs import NO_LAST_ROWS, build_inputs, dummy_item
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.build import build_runner
from replicas.model.hardware.device import compute_capability
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.sampling.fixed_arrays import FixedSampling, SamplingPadding
from replicas.model.sampling.sampler import Sampler, SamplingPlanner, sample_greedy, token_counts
from replicas.model.sampling.token_counts import CountSlots, TokenCounts
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import sampling_of

CONTEXT = 1024
BATCH_SIZES = (1, 64, 256)
BLOCK_SIZE = 16
_COPIED_BYTES = 4 * 2**30
SHAPES: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151_936, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LLAMA_1B,
    "Llama-3.1-8B": LLAMA_8B,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Decode time beside its floor: the time to read weights and KV once at the copy bandwidth."""

    shape: str
    attention: str
    batch_size: int
    context: int
    step_ms: float
    floor_ms: float
    attention_ms: float | None
    """Time of all layers' attention and KV writes, replayed from a graph; None if it cannot be captured."""
    attention_floor_ms: float

    def describe(self) -> str:
        """Return one line of text."""
        share = f"{self.floor_ms / self.step_ms:6.1%} of memory bandwidth"
        attention = "" if self.attention_ms is None else (
            f"; attention alone {self.attention_ms:7.3f} ms, {self.attention_floor_ms / self.attention_ms:6.1%}"
        )  # fmt: skip
        batch = f"{self.batch_size} x {self.context}"
        return f"{self.shape:13} {self.attention:7} {batch:>10} {self.step_ms:8.2f} ms, {share}{attention}"


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy within the device's memory."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / (median_ms(lambda: target.copy_(source), "cuda") / 1000)


def measure_decodes(device: str, bandwidth: float) -> list[DecodeTime]:
    """Measure every shape and batch size with Triton's kernels, the smallest shape with plain torch too."""
    times = []
    for shape, config in SHAPES.items():
        loaded = random_model(config, torch.bfloat16, device)
        for attention in ("triton", "gather") if shape == "Qwen2.5-0.5B" else ("triton",):
            limits = EngineLimits(BLOCK_SIZE, max(BATCH_SIZES), max_num_batched_tokens=2048)
            runner = build_runner(loaded, limits, RunnerOptions(attention_backend=attention))
            steps_ms = [measure_decode(runner, size, CONTEXT, GREEDY).median_ms for size in BATCH_SIZES]
            del runner  # frees most of the device's memory
            release()
            for batch_size, step_ms in zip(BATCH_SIZES, steps_ms, strict=True):
                times.append(_compare(shape, attention, loaded, batch_size, step_ms, bandwidth))
                print(times[-1].describe(), flush=True)
        del loaded
        release()
    return times


def _compare(
    shape: str, attention: str, loaded: LoadedModel, batch_size: int, step_ms: float, bandwidth: float
) -> DecodeTime:
    kv_bytes = batch_size * CONTEXT * bytes_per_block(loaded.layers, BLOCK_SIZE, loaded.dtype) // BLOCK_SIZE
    return DecodeTime(
        shape=shape,
        attention=attention,
        batch_size=batch_size,
        context=CONTEXT,
        step_ms=step_ms,
        floor_ms=1000 * (read_bytes(loaded) + kv_bytes) / bandwidth,
        attention_ms=attention_ms(loaded.layers, batch_size, loaded.device) if attention == "triton" else None,
        attention_floor_ms=1000 * kv_bytes / bandwidth,
    )


def read_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of weights that a step reads: all but the input embeddings, unless they are the head too."""
    embeddings = loaded.model.get_input_embeddings().weight
    is_head = embeddings is loaded.model.get_output_embeddings().weight
    total = sum(parameter.numel() * parameter.itemsize for parameter in loaded.model.parameters())
    return int(total - (0 if is_head else embeddings.numel() * embeddings.itemsize))


def attention_ms(layers: tuple[AttentionLayer, ...], batch_size: int, device: torch.device) -> float:
    """Measure all layers' attention of a decode step, each over its own KV, from a graph: no launch is timed."""
    num_blocks = batch_size * CONTEXT // BLOCK_SIZE
    cache = KVCache(layers, num_blocks, BLOCK_SIZE, torch.bfloat16, device)
    for layer in layers:  # zeros would take less power and run faster
        cache[layer.index].keys.normal_()
        cache[layer.index].values.normal_()
    tables = 1 + torch.randperm(num_blocks, device=device, dtype=torch.int32).view(batch_size, -1)
    rows = [[index, CONTEXT - 1, 1, index] for index in range(batch_size)]
    chunks = torch.tensor(rows, dtype=torch.int32, device=device)
    plan = AttentionPlan(ChunkGroup(chunks, tables, num_tokens=batch_size, longest=CONTEXT))
    slots = tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    attention = TritonBackend(num_processors, compute_capability(device)).planned(cache, slots, plan)
    calls = [_call(layer, batch_size, device) for layer in layers]
    return _graph_ms(lambda: [attention.attend(call) for call in calls])


def _call(
    layer: AttentionLayer, batch_size: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> AttentionCall:
    def draw(num_heads: int, size: int) -> torch.Tensor:
        return torch.randn(batch_size, num_heads, size, dtype=dtype, device=device)

    return AttentionCall(
        layer=layer.index,
        query=draw(layer.num_query_heads, layer.key_size),
        key=draw(layer.num_kv_heads, layer.key_size),
        value=draw(layer.num_kv_heads, layer.value_size),
        scoring=Scoring(layer.key_size**-0.5),
        window=None,
        extras=frozenset(),
    )


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Attention of one layer over a whole prompt, beside torch's own attention on keys without blocks."""

    head_size: int
    num_tokens: int
    kernel_ms: float
    tflop_per_s: float
    sdpa_ms: float
    """Time of `scaled_dot_product_attention`, which has no cache to write."""

    def describe(self) -> str:
        """Return some words of text."""
        ratio = f"{self.sdpa_ms / self.kernel_ms:.2f} of torch's speed"
        return f"{self.num_tokens} x {self.head_size}: {self.kernel_ms:.3f} ms, {self.tflop_per_s:.1f} TFLOP/s, {ratio}"


def measure_prefills(device: str, is_tiny: bool = False) -> list[PrefillTime]:
    """Measure prompts of several lengths and heads of several sizes: 32 heads, 8 of keys and values, bfloat16."""
    sizes, lengths, num_heads = ((16,), (32,), 2) if is_tiny else ((64, 128, 256), (512, 2048, 8192), 32)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    num_kv_heads = max(1, num_heads // 4)
    layers = [AttentionLayer(0, num_heads, num_kv_heads, size, size, None, None, False) for size in sizes]
    return [_prefill(layer, length, dtype, torch.device(device)) for layer in layers for length in lengths]


def _prefill(layer: AttentionLayer, num_tokens: int, dtype: torch.dtype, device: torch.device) -> PrefillTime:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = KVCache((layer,), num_blocks, BLOCK_SIZE, dtype, device)
    sequence = EngineSequence(GenerateRequest("prompt", (5,) * num_tokens, GREEDY), 0.0, None, 0)
    sequence.block_table = list(range(1, num_blocks + 1))
    inputs = build_inputs([ScheduledSequence.of(sequence, 0, num_tokens)], BLOCK_SIZE, device)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    attention = TritonBackend(num_processors, compute_capability(device))(cache, inputs)
    call = _call(layer, num_tokens, device, dtype)
    repetitions = NUM_ITERATIONS if device.type == "cuda" else 1
    kernel_ms = median_ms(lambda: attention.attend(call), device.type, repetitions)
    query, key, value = (each.transpose(0, 1)[None] for each in (call.query, call.key, call.value))

    def plain() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    sdpa_ms = median_ms(plain, device.type, repetitions)
    num_flop = 2 * 2 * layer.num_query_heads * layer.key_size * num_tokens * (num_tokens + 1) / 2
    return PrefillTime(layer.key_size, num_tokens, kernel_ms, num_flop / kernel_ms / 1e9, sdpa_ms)


def measure_sampling(
    device: str, kinds: Mapping[str, SamplingParams], sizes: Sequence[int], vocab_size: int
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of the choice of tokens by kind and number of rows; each row has 1,000 tokens.

    On a GPU it is that after a pass in graphs, without the pass.
    """
    times: dict[str, dict[str, float]] = {}
    for kind, params in kinds.items():
        times[kind] = {}
        for size in sizes:
            logits = torch.randn(size, vocab_size, device=device)
            prompt = tuple(range(1000))
            rows = [
                EngineSequence(GenerateRequest(str(row), prompt, replace(params, seed=row)), 0.0, None, row)
                for row in range(size)
            ]
            counts = token_counts(size, vocab_size, torch.device(device))
            choose: Callable[[], object] = partial(sampling_of(vocab_size, counts=counts), logits, rows)
            if counts is not None:
                choose = _captured_sampling(logits, rows, counts)
            times[kind][str(size)] = round(median_ms(choose, device, NUM_ITERATIONS if device == "cuda" else 2), 3)
    return times


def _captured_sampling(logits: Tensor, rows: Sequence[EngineSequence], counts: TokenCounts) -> Callable[[], object]:
    """Return the choice of tokens after a pass in graphs: its plan, the greedy choice, a replay and the wait for it."""
    columns = BatchColumns.of([ScheduledSequence.of(row, 0, len(row.token_ids)) for row in rows])
    planner = SamplingPlanner(frozenset(), logits.shape[1], CountSlots(*counts.table.shape))
    padding, fixed, sampler = SamplingPadding((len(rows),)), FixedSampling(logits, counts), Sampler(counts)
    graph, outputs = torch.cuda.CUDAGraph(), sample_greedy(logits)

    def choose(is_first: bool = False) -> None:
        nonlocal outputs
        to_device, to_host = HostToDeviceBuffer(), DeviceToHostBuffer()
        plan = planner.plan(columns, NO_LAST_ROWS, to_device)
        plan = padding.plan(plan, len(rows), to_device, has_masks=False)
        on_device, chosen = DeviceBuffer.of(to_device.words, no_tokens(logits.device)), sample_greedy(logits)
        if plan.fixed is not None:
            fixed.load(plan, chosen, on_device, None)
            if is_first:
                fixed.choose(plan.fixed.shape)  # compiled before it is captured
                with torch.cuda.graph(graph):
                    outputs = fixed.choose(plan.fixed.shape)
            graph.replay()
            chosen = outputs
        sampler.launch(plan, logits, chosen, on_device, to_host)
        to_host.close(logits.device)
        to_host.wait()

    choose(is_first=True)
    return choose


def measure_recurrence(device: str, layers: Mapping[str, StateLayer]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of one recurrent layer in a graph: decodes in the middle of a block, and a prompt."""
    times: dict[str, dict[str, float]] = {}
    for number, (name, layer) in enumerate(layers.items()):
        cache = StateCache([layer], max(BATCH_SIZES), BLOCK_SIZE, torch.bfloat16, torch.device(device))
        steps = {
            f"decode {size}": [
                replace(dummy_item(CONTEXT + BLOCK_SIZE // 2, 1, BLOCK_SIZE), state=StateMove(slot, slot))
                for slot in range(1, 1 + size)
            ]
            for size in BATCH_SIZES
        }
        steps["prompt 2048"] = [replace(dummy_item(0, 2048, BLOCK_SIZE), state=StateMove(0, 1))]
        times[name] = {}
        for step, items in steps.items():
            inputs = build_inputs(items, BLOCK_SIZE, cache.device)
            conv, rule = state_calls(layer, inputs, torch.bfloat16, seed=number)
            states = TritonStateBackend()(cache, inputs)
            times[name][step] = round(_graph_ms(lambda: computed(states, conv, rule)), 4)  # noqa: B023  (run at once)
    return times


def _graph_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of a replay of `run`, captured in a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay, "cuda")
