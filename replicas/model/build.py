"""A runner whose KV cache fits the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replicas.engine.batch import ScheduledBatch
from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.attention import AttentionFactory
from replicas.model.attention_choice import choose_attention
from replicas.model.cuda_graphs import PaddedDecodes, PlannedAttention, bucket_sizes
from replicas.model.kv_cache import KVCache, bytes_per_block
from replicas.model.loader import LoadedModel
from replicas.model.options import RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.model.scratch import scratch_batches, scratch_item


def build_runner(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> TorchModelRunner:
    """Build a runner for `loaded` with as many KV blocks as `options` allow.

    Raises:
        ModelLoadError: not even one block fits, or the attention backend asked for does not work.
    """
    attention = choose_attention(loaded.attention_spec(limits.block_size), options.attention_backend)
    block_bytes = bytes_per_block(loaded.layers, limits.block_size, loaded.dtype)
    if loaded.device.type == "cuda":
        available = _available_cuda_bytes(loaded, attention, limits, options)
        limit = f"gpu_memory_utilization ({options.gpu_memory_utilization}) leaves {available} bytes"
    else:
        available = options.kv_cache_bytes
        limit = f"kv_cache_bytes is {available}"
    num_blocks = available // block_bytes - 1  # One more is scratch.
    if num_blocks < 1:
        raise ModelLoadError(f"{limit} for the KV cache; two blocks need {2 * block_bytes} bytes")
    cache = _cache(loaded, limits.block_size, num_blocks)
    decodes = None if options.enforce_eager else _captured_decodes(loaded, cache, attention, limits.max_num_seqs)
    return TorchModelRunner(loaded, cache, attention, decodes)


def warm_up(runner: TorchModelRunner, limits: EngineLimits) -> None:
    """Run a prefill and decodes in the scratch block, so that no request pays for a first run."""
    num_prefill_tokens = min(limits.max_num_batched_tokens, runner.max_model_len)
    decode = scratch_item(runner.max_model_len // 2, 1, limits.block_size)
    prefill = scratch_item(0, num_prefill_tokens, limits.block_size)
    _run(runner, [ScheduledBatch((decode,) * size) for size in (1, limits.max_num_seqs)])
    _run(runner, [ScheduledBatch((prefill,))])


def _captured_decodes(
    loaded: LoadedModel, cache: KVCache, attention: AttentionFactory, max_num_seqs: int
) -> PaddedDecodes | None:
    """Decodes in CUDA graphs, where device, attention backend and the model's code allow it."""
    planned: PlannedAttention | None = getattr(attention, "planned", None)  # Not every backend can be captured.
    if loaded.device.type != "cuda" or planned is None:
        return None
    decodes = PaddedDecodes(loaded, cache, planned, bucket_sizes(max_num_seqs))
    return decodes if decodes.capture() else None


def _available_cuda_bytes(
    loaded: LoadedModel, attention: AttentionFactory, limits: EngineLimits, options: RunnerOptions
) -> int:
    """Memory that the largest steps leave, measured by running them over a cache of the scratch block alone."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(loaded.device)
    runner = TorchModelRunner(loaded, _cache(loaded, limits.block_size, num_blocks=0), attention)
    sizes = (limits.max_num_seqs, limits.max_num_batched_tokens, loaded.max_model_len, limits.block_size)
    _run(runner, scratch_batches(*sizes))
    torch.cuda.synchronize(loaded.device)
    peak = torch.cuda.max_memory_allocated(loaded.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(loaded.device)
    # What other processes, and CUDA itself in this one, hold.
    foreign = total - free - torch.cuda.memory_reserved(loaded.device)
    return int(total * options.gpu_memory_utilization) - peak - foreign


def _cache(loaded: LoadedModel, block_size: int, num_blocks: int) -> KVCache:
    return KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)


def _run(runner: TorchModelRunner, batches: Iterable[ScheduledBatch]) -> None:
    for batch in batches:
        runner.execute(batch)
