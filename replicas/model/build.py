"""Construction of a runner, with a KV cache that fits the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache, bytes_per_block, num_tensors
from replicas.model.attention.select import FlashAndTriton, choose_attention
from replicas.model.attention.state_cache import StateCache, bytes_per_slot
from replicas.model.batch.inputs import batches_of_every_kind, dummy_batches, dummy_item
from replicas.model.cuda_graphs.graphs import SMALL_MIXED, GraphRunner, PlannedAttention, largest_mixed, step_shapes
from replicas.model.hardware.device import choose_cache_dtype, compute_capability
from replicas.model.hardware.device_memory import CudaMemory, MemoryShare, MemoryUse, measure_use
from replicas.model.loading.facts import choose_state_slots
from replicas.model.loading.loader import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.sampler import has_draw_kernel, token_counts


def build_runner(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> TorchModelRunner:
    """Build a runner for `loaded` with as many KV blocks as `options` allow.

    Raises:
        ModelLoadError: fewer than two blocks fit, or a requested attention backend or kernel does not work.
    """
    if loaded.is_batch_invariant and not has_draw_kernel(loaded.device):
        raise ModelLoadError("batch_invariant is true, and the kernel that it needs for sampling does not work here")
    cache_dtype = choose_cache_dtype(options.kv_cache_dtype, loaded.dtype)
    attention = choose_attention(loaded.attention_spec(limits.block_size, cache_dtype), options.attention_backend)
    graphs = _graph_builder(loaded, attention, limits, options)
    if loaded.device.type == "cuda":
        use = _measure_on_cuda(loaded, attention, limits, options, graphs)
        available = use.cache_bytes(num_tensors(loaded.layers, cache_dtype))
        limit = f"gpu_memory_utilization ({options.gpu_memory_utilization} of {min(1.0, options.num_gpus):g} GPU) {use}"
    else:
        available = options.kv_cache_bytes
        limit = f"kv_cache_bytes is {available}"
    states = _state_cache(loaded, limits, available, limit)
    if states is not None:
        state_bytes = (states.num_slots + 1) * bytes_per_slot(loaded.state_layers, limits.block_size, loaded.dtype)
        available -= state_bytes
        limit += f", of which {states.num_slots} slots for recurrent state take {state_bytes},"
    block_bytes = bytes_per_block(loaded.layers, limits.block_size, cache_dtype)
    num_blocks = available // block_bytes - 1  # One block is the scratch block.
    if num_blocks < 1:
        raise ModelLoadError(f"{limit} for the KV cache; two blocks need {2 * block_bytes} bytes")
    cache = KVCache(loaded.layers, num_blocks, limits.block_size, cache_dtype, loaded.device)
    cache.states = states
    captured = None if graphs is None else graphs.captured(cache)
    counts = token_counts(limits.max_num_seqs, loaded.vocab_size, loaded.device)
    return TorchModelRunner(loaded, cache, attention, captured, counts)


def _state_cache(loaded: LoadedModel, limits: EngineLimits, available: int, limit: str) -> StateCache | None:
    """Return slots for recurrent state, in at most half of the memory; None: the model has none.

    Raises:
        ModelLoadError: the slots of one sequence do not fit.
    """
    if not loaded.state_layers:
        return None
    slot_bytes = bytes_per_slot(loaded.state_layers, limits.block_size, loaded.dtype)
    num_slots = choose_state_slots(available, slot_bytes, limits, limit, has_gpu=loaded.device.type == "cuda")
    return StateCache(loaded.state_layers, num_slots, limits.block_size, loaded.dtype, loaded.device)


def warm_up(runner: TorchModelRunner, limits: EngineLimits) -> None:
    """Run decodes and a prefill in the scratch block, so that no request pays for kernels' first runs."""
    num_prefill_tokens = min(limits.max_num_batched_tokens, runner.max_model_len)
    decode = dummy_item(runner.max_model_len // 2, 1, limits.block_size)
    prefill = dummy_item(0, num_prefill_tokens, limits.block_size)
    _run(runner, [ScheduledBatch((decode,) * size) for size in (1, limits.max_num_seqs)])
    _run(runner, [ScheduledBatch((prefill,))])


class _GraphBuilder:
    """Builder of captured steps over a cache."""

    def __init__(self, loaded: LoadedModel, attention: PlannedAttention, limits: EngineLimits, max_mixed: int) -> None:
        self._loaded = loaded
        self._attention = attention
        self._shapes = step_shapes(limits.max_num_seqs, limits.max_num_batched_tokens, max_mixed)
        self._stream = torch.cuda.Stream(loaded.device)  # type: ignore[no-untyped-call]
        self._is_possible = True

    def captured(self, cache: KVCache) -> GraphRunner | None:
        """Return captured CUDA graphs; None if the model prevents it, now or at an earlier call."""
        if not self._is_possible:
            return None
        graphs = GraphRunner(self._loaded, cache, self._attention, self._shapes)
        self._is_possible = graphs.capture(self._stream)
        return graphs if self._is_possible else None


def _graph_builder(
    loaded: LoadedModel, attention: AttentionBackend, limits: EngineLimits, options: RunnerOptions
) -> _GraphBuilder | None:
    """Return a builder of CUDA graphs; None if the device, the attention backend, the options or the model have none.

    Recurrent layers run in plain torch, which looks at the lengths of the chunks on the host.
    """
    planned: PlannedAttention | None = getattr(attention, "planned", None)  # The gather backend has none.
    if loaded.device.type != "cuda" or planned is None or options.enforce_eager or loaded.state_layers:
        return None
    # FlashAttention 3 is faster than the graphs' attention for long prompts.
    has_flash = isinstance(attention, FlashAndTriton)
    max_mixed = SMALL_MIXED if has_flash else largest_mixed(compute_capability(loaded.device))
    return _GraphBuilder(loaded, planned, limits, max_mixed)


def _measure_on_cuda(
    loaded: LoadedModel,
    attention: AttentionBackend,
    limits: EngineLimits,
    options: RunnerOptions,
    graphs: _GraphBuilder | None,
) -> MemoryUse:
    """Measure the largest steps and the graphs over a cache that has the scratch block alone."""
    cache_dtype = choose_cache_dtype(options.kv_cache_dtype, loaded.dtype)
    scratch = KVCache(loaded.layers, 0, limits.block_size, cache_dtype, loaded.device)
    if loaded.state_layers:
        scratch.states = StateCache(loaded.state_layers, 0, limits.block_size, loaded.dtype, loaded.device)
    counts = token_counts(limits.max_num_seqs, loaded.vocab_size, loaded.device)
    runner = TorchModelRunner(loaded, scratch, attention, counts=counts)
    sizes = (limits.max_num_seqs, limits.max_num_batched_tokens, loaded.max_model_len, limits.block_size)

    def run_steps() -> None:
        _warm_up_sampling(runner, limits)
        _run(runner, dummy_batches(*sizes))

    return measure_use(
        CudaMemory(loaded.device),
        MemoryShare(options.gpu_memory_utilization, options.num_gpus),
        run_steps,
        lambda: None if graphs is None else graphs.captured(scratch),
    )


def _warm_up_sampling(runner: TorchModelRunner, limits: EngineLimits) -> None:
    """Run small steps of every kind, and a step before the last one is known, in the scratch block.

    A GPU's libraries load the code of an operation, and take memory for it, when it first runs.
    """
    _run(runner, batches_of_every_kind(limits.max_num_seqs, limits.block_size))
    for batch in batches_of_every_kind(limits.max_num_seqs, limits.block_size):
        first = runner.launch(batch)
        first.sample()
        item = batch.items[0]
        if item.samples and not batch.is_constrained:
            item.sequence.launched(item.num_tokens, item.samples)
            _run(runner, [ScheduledBatch((ScheduledSequence.of(item.sequence, item.end, 1),))])
        first.collect()


def _run(runner: TorchModelRunner, batches: Iterable[ScheduledBatch]) -> None:
    for batch in batches:
        runner.execute(batch)
