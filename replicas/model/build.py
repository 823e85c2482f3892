"""Construction of a runner, with a KV cache that fits the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replicas.engine.batch import ScheduledBatch
from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache, bytes_per_block
from replicas.model.attention.select import choose_attention
from replicas.model.batch.inputs import dummy_batches, dummy_item
from replicas.model.decode_graphs.graphs import DecodeGraphRunner, PlannedAttention, bucket_sizes
from replicas.model.loading.loader import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.runner import TorchModelRunner


def build_runner(loaded: LoadedModel, limits: EngineLimits, options: RunnerOptions) -> TorchModelRunner:
    """Build a runner for `loaded` with as many KV blocks as `options` allow.

    Raises:
        ModelLoadError: fewer than two blocks fit, or the requested attention backend does not work.
    """
    attention = choose_attention(loaded.attention_spec(limits.block_size), options.attention_backend)
    block_bytes = bytes_per_block(loaded.layers, limits.block_size, loaded.dtype)
    if loaded.device.type == "cuda":
        available = _available_cuda_bytes(loaded, attention, limits, options)
        limit = f"gpu_memory_utilization ({options.gpu_memory_utilization}) leaves {available} bytes"
    else:
        available = options.kv_cache_bytes
        limit = f"kv_cache_bytes is {available}"
    num_blocks = available // block_bytes - 1  # One block is the scratch block.
    if num_blocks < 1:
        raise ModelLoadError(f"{limit} for the KV cache; two blocks need {2 * block_bytes} bytes")
    cache = _cache(loaded, limits.block_size, num_blocks)
    decode_graphs = (
        None if options.enforce_eager else _decode_graph_runner(loaded, cache, attention, limits.max_num_seqs)
    )
    return TorchModelRunner(loaded, cache, attention, decode_graphs)


def warm_up(runner: TorchModelRunner, limits: EngineLimits) -> None:
    """Run decodes and a prefill in the scratch block, so that no request pays for kernels' first runs."""
    num_prefill_tokens = min(limits.max_num_batched_tokens, runner.max_model_len)
    decode = dummy_item(runner.max_model_len // 2, 1, limits.block_size)
    prefill = dummy_item(0, num_prefill_tokens, limits.block_size)
    _run(runner, [ScheduledBatch((decode,) * size) for size in (1, limits.max_num_seqs)])
    _run(runner, [ScheduledBatch((prefill,))])


def _decode_graph_runner(
    loaded: LoadedModel, cache: KVCache, attention: AttentionBackend, max_num_seqs: int
) -> DecodeGraphRunner | None:
    """Return captured CUDA graphs of decodes; None if the device, the attention backend or the model prevents it."""
    planned: PlannedAttention | None = getattr(attention, "planned", None)  # The gather backend has none.
    if loaded.device.type != "cuda" or planned is None:
        return None
    decode_graphs = DecodeGraphRunner(loaded, cache, planned, bucket_sizes(max_num_seqs))
    return decode_graphs if decode_graphs.capture() else None


def _available_cuda_bytes(
    loaded: LoadedModel, attention: AttentionBackend, limits: EngineLimits, options: RunnerOptions
) -> int:
    """Return the bytes left for the KV cache, after measuring the peak of the largest steps.

    The steps run over a cache that has the scratch block alone.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(loaded.device)
    runner = TorchModelRunner(loaded, _cache(loaded, limits.block_size, num_blocks=0), attention)
    sizes = (limits.max_num_seqs, limits.max_num_batched_tokens, loaded.max_model_len, limits.block_size)
    _run(runner, dummy_batches(*sizes))
    torch.cuda.synchronize(loaded.device)
    peak = torch.cuda.max_memory_allocated(loaded.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(loaded.device)
    # Memory of other processes and of this process's CUDA context.
    foreign = total - free - torch.cuda.memory_reserved(loaded.device)
    return int(total * options.gpu_memory_utilization) - peak - foreign


def _cache(loaded: LoadedModel, block_size: int, num_blocks: int) -> KVCache:
    return KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)


def _run(runner: TorchModelRunner, batches: Iterable[ScheduledBatch]) -> None:
    for batch in batches:
        runner.execute(batch)
