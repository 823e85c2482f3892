"""Construction of a runner, with a KV cache that fits the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.config import LOWERED_LIMITS, EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.layer_groups import bytes_of_block, grouped_cache, num_cache_tensors
from replicas.model.attention.select import FlashAndTriton, choose_attention, choose_two_sided
from replicas.model.attention.state_cache import StateCache, bytes_per_slot
from replicas.model.attention.state_select import choose_states
from replicas.model.batch.inputs import batches_of_every_kind, dummy_batches, dummy_item
from replicas.model.cuda_graphs.graphs import SMALL_MIXED, GraphRunner, PlannedAttention, largest_mixed, step_shapes
from replicas.model.hardware.device import choose_cache_dtype, compute_capability
from replicas.model.hardware.device_memory import CudaMemory, MemoryShare, MemoryUse, measure_use
from replicas.model.loading.facts import choose_state_slots, state_bytes
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.sampler import has_draw_kernel, token_counts
from replicas.model.sampling.token_counts import TokenCounts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FittedRunner:
    """Runner with the limits that its KV cache holds."""

    runner: TorchModelRunner
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for a KV cache, with the words for the case that they are too few."""

    num_bytes: int
    reason: str
    num_state_slots: int = 0
    """Slots for recurrent state, which have their own bytes; 0: the model has none."""

    def beside_states(self, num_slots: int, slot_bytes: int) -> Room:
        """Return the room that slots for recurrent state, and a scratch slot, leave."""
        taken = state_bytes(num_slots, slot_bytes)
        reason = f"{self.reason}, of which {num_slots} slots for recurrent state take {taken},"
        return Room(self.num_bytes - taken, reason, num_slots)


def build_runner(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> TorchModelRunner:
    """Build a runner for `loaded` with as many KV blocks as `options` allow. See `build_fitted`."""
    return build_fitted(loaded, limits, options).runner


def build_fitted(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> FittedRunner:
    """Build a runner for `loaded` with as many KV blocks as `options` allow, and lower the limits that nobody chose.

    Raises:
        ModelLoadError: too few blocks fit, or a requested attention backend or kernel does not work.
    """
    if loaded.is_batch_invariant and not has_draw_kernel(loaded.device):
        raise ModelLoadError("batch_invariant is true, and the kernel that it needs for sampling does not work here")
    if loaded.is_two_sided:
        return _fitted_without_cache(loaded, limits, options)
    cache_dtype = choose_cache_dtype(options.kv_cache_dtype, loaded.dtype)
    spec = loaded.attention_spec(limits.block_size, cache_dtype)
    attention = choose_attention(spec, options.attention_backend, loaded.agree)
    loaded.port.recurrent.backend = choose_states(loaded.state_spec(limits.block_size), loaded.agree)
    graphs = _graph_builder(loaded, attention, options)
    has_gpu = loaded.device.type == "cuda"
    groups = loaded.layer_groups(cache_dtype)
    block_bytes = bytes_of_block(groups, limits.block_size, cache_dtype)
    slot_bytes = bytes_per_slot(loaded.state_layers, limits.block_size, loaded.dtype)

    def room(tried: EngineLimits) -> Room:
        num_ranks = 1 if loaded.ranks is None else loaded.ranks.share.num_ranks
        whole = Room(options.kv_cache_bytes // num_ranks, f"kv_cache_bytes is {options.kv_cache_bytes}")
        if has_gpu:
            whole = _room_on_cuda(loaded, attention, tried, options, graphs)
        if loaded.ranks is not None:
            whole = replace(whole, num_bytes=loaded.ranks.least(whole.num_bytes))
        if not loaded.state_layers or whole.num_bytes == 0:
            return whole
        num_slots = choose_state_slots(whole.num_bytes, slot_bytes, tried, whole.reason, has_gpu=has_gpu)
        return whole.beside_states(num_slots, slot_bytes)

    limits, num_blocks, num_slots = fit_limits(limits, block_bytes, room, len(groups))
    cache = grouped_cache(groups, num_blocks, limits.block_size, cache_dtype, loaded.device)
    if num_slots:
        cache.states = StateCache(loaded.state_layers, num_slots, limits.block_size, loaded.dtype, loaded.device)
    counts = token_counts(limits.max_num_seqs, loaded.vocab_size, loaded.device, loaded.agree)
    captured = None if graphs is None else graphs.captured(cache, limits, counts)
    return FittedRunner(TorchModelRunner(loaded, cache, attention, captured, counts), limits)


def _fitted_without_cache(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> FittedRunner:
    """Return a runner of whole texts, whose blocks have no memory; there are enough for all that run together."""
    spec = replace(loaded.attention_spec(limits.block_size), layers=loaded.two_sided_layers)
    attention = choose_two_sided(spec, options.attention_backend)
    longest = min(loaded.max_model_len, limits.max_num_batched_tokens)
    num_blocks = limits.max_num_seqs * -(-longest // limits.block_size)
    cache = KVCache((), num_blocks, limits.block_size, loaded.dtype, loaded.device)
    return FittedRunner(TorchModelRunner(loaded, cache, attention), limits)


def fit_limits(
    limits: EngineLimits, block_bytes: int, room: Callable[[EngineLimits], Room], num_tables: int = 1
) -> tuple[EngineLimits, int, int]:
    """Return the limits, lowered until the KV cache holds them, its number of blocks and that of state slots.

    A sequence has `num_tables` block tables. Smaller steps take less memory beside the cache, so `room` is asked again
    for lowered limits.

    Raises:
        ModelLoadError: fewer blocks fit than a short sequence needs.
    """
    while True:
        space = room(limits)
        num_blocks = space.num_bytes // block_bytes - 1  # One block is the scratch block.
        lower = limits.held_by(num_blocks // num_tables)
        if lower == limits:
            break
        limits = lower
    if num_blocks < num_tables:
        raise ModelLoadError(
            f"{space.reason} for the KV cache; {1 + num_tables} blocks need {(1 + num_tables) * block_bytes} bytes"
        )
    return limits, num_blocks, space.num_state_slots


def describe_lowered(before: EngineLimits, after: EngineLimits, num_blocks: int, num_tables: int = 1) -> str | None:
    """Return a sentence about the limits that were lowered, and the reason; None if there are none.

    The cache has `num_blocks` blocks, for `num_tables` tables of each sequence.
    """
    names = [name for name in LOWERED_LIMITS if getattr(before, name) != getattr(after, name)]
    if not names:
        return None
    lowered = " and ".join(f"{name} from {getattr(before, name):,} to {getattr(after, name):,}" for name in names)
    num_tokens = num_blocks // num_tables * after.block_size
    return f"{lowered}: the KV cache holds {num_tokens:,} tokens; give it more memory, or set the limits to keep them"


def warm_up(runner: TorchModelRunner, limits: EngineLimits) -> None:
    """Run decodes and a prefill in the scratch block, so that no request pays for kernels' first runs."""
    num_prefill_tokens = min(limits.max_num_batched_tokens, runner.max_model_len)
    decode = dummy_item(runner.max_model_len // 2, 1, limits.block_size)
    prefill = dummy_item(0, num_prefill_tokens, limits.block_size)
    _run(runner, [ScheduledBatch((decode,) * size) for size in (1, limits.max_num_seqs)])
    _run(runner, [ScheduledBatch((prefill,))])


class _GraphBuilder:
    """Builder of captured steps over a cache."""

    def __init__(self, loaded: LoadedModel, attention: PlannedAttention, max_mixed: int) -> None:
        self._loaded = loaded
        self._attention = attention
        self._max_mixed = max_mixed
        self._stream = torch.cuda.Stream(loaded.device)  # type: ignore[no-untyped-call]
        self._is_possible = True

    def captured(self, cache: KVCache, limits: EngineLimits, counts: TokenCounts | None) -> GraphRunner | None:
        """Return captured CUDA graphs; None if the model prevents it, now or at an earlier call.

        Sampling is captured too, with the sampler's `counts`, if kernels do it and each row of the logits is whole.
        """
        if not self._is_possible:
            return None
        shapes = step_shapes(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self._max_mixed,
            has_states=bool(self._loaded.state_layers),
        )
        is_captured = self._loaded.cut_logits is None and has_draw_kernel(self._loaded.device)
        graphs = GraphRunner(self._loaded, cache, self._attention, shapes, counts if is_captured else None)
        self._is_possible = self._loaded.agree(graphs.capture(self._stream))
        return graphs if self._is_possible else None


def _graph_builder(loaded: LoadedModel, attention: AttentionBackend, options: RunnerOptions) -> _GraphBuilder | None:
    """Return a builder of CUDA graphs; None if the device, a backend or the options have none.

    Recurrent layers in plain torch look at the lengths of the chunks on the host.
    """
    planned: PlannedAttention | None = getattr(attention, "planned", None)  # The gather backend has none.
    has_torch_states = bool(loaded.state_layers) and loaded.port.recurrent.backend is None
    if loaded.device.type != "cuda" or planned is None or options.enforce_eager or has_torch_states:
        return None
    # FlashAttention 3 is faster than the graphs' attention for long prompts.
    has_flash = isinstance(attention, FlashAndTriton)
    max_mixed = SMALL_MIXED if has_flash else largest_mixed(compute_capability(loaded.device))
    return _GraphBuilder(loaded, planned, max_mixed)


def _room_on_cuda(
    loaded: LoadedModel,
    attention: AttentionBackend,
    limits: EngineLimits,
    options: RunnerOptions,
    graphs: _GraphBuilder | None,
) -> Room:
    """Return the memory that the largest steps and the graphs leave.

    Raises:
        ModelLoadError: they do not fit the memory, and no limit can be lowered.
    """
    try:
        use = _measure_on_cuda(loaded, attention, limits, options, graphs)
    except (torch.OutOfMemoryError, ModelLoadError) as error:
        if limits.held_by(0) == limits:
            raise
        _log.info(
            "%d sequences and %d tokens a step do not fit the memory: %s",
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            error,
        )
        return Room(0, str(error))
    cache_dtype = choose_cache_dtype(options.kv_cache_dtype, loaded.dtype)
    share = f"gpu_memory_utilization ({options.gpu_memory_utilization} of {min(1.0, options.num_gpus):g} GPU)"
    num_tensors = num_cache_tensors(loaded.layer_groups(cache_dtype), cache_dtype)
    return Room(use.cache_bytes(num_tensors), f"{share} {use}")


def _measure_on_cuda(
    loaded: LoadedModel,
    attention: AttentionBackend,
    limits: EngineLimits,
    options: RunnerOptions,
    graphs: _GraphBuilder | None,
) -> MemoryUse:
    """Measure the largest steps and the graphs over a cache that has the scratch block alone."""
    cache_dtype = choose_cache_dtype(options.kv_cache_dtype, loaded.dtype)
    scratch = grouped_cache(loaded.layer_groups(cache_dtype), 0, limits.block_size, cache_dtype, loaded.device)
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
        lambda: None if graphs is None else graphs.captured(scratch, limits, counts),
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
