"""Runner of decodes in CUDA graphs, captured at a few batch sizes: one launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionContext
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.plan import AttentionPlan
from replicas.model.batch.inputs import LastSampledTokens, wants_prompt_logprobs
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer
from replicas.model.decode_graphs.buffers import DecodeBuffers, SentDecodes
from replicas.model.loading.loader import LoadedModel
from replicas.model.sampling.sampler import SampledTokens, sample_greedy

_log = logging.getLogger(__name__)

PlannedAttention = Callable[[KVCache, Tensor, AttentionPlan], AttentionContext]
"""Factory of the attention by a plan whose tensors outlive the pass, from cache, slots [num_tokens] int64 and plan."""
_MEBIBYTE = 2**20


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, 8, then steps of 8 rows or, if that is more, of about a quarter."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, size // 4 // 8 * 8)
    return (*sizes, max_num_seqs)


@dataclass(frozen=True, slots=True)
class DecodeOutputs:
    """Outputs of a pass over decodes, one row each. The next replay of any graph overwrites them."""

    logits: Tensor  # [num_rows, vocab_size] in the model's dtype
    greedy: SampledTokens

    def first(self, num_rows: int) -> DecodeOutputs:
        """Return the outputs of the first `num_rows` rows."""
        greedy = SampledTokens(self.greedy.tokens[:num_rows], self.greedy.is_finite[:num_rows])
        return DecodeOutputs(self.logits[:num_rows], greedy)


class DecodeGraphRunner:
    """Runner of batches of decodes, which are padded to the next bucket with rows that have no sequence.

    A graph holds the whole forward pass and the greedy choice. A bucket without a graph runs the same code eagerly.
    """

    def __init__(
        self, loaded: LoadedModel, cache: KVCache, attention: PlannedAttention, buckets: tuple[int, ...]
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self._buckets = buckets
        num_blocks = -(-loaded.max_model_len // cache.block_size)
        self._buffers = DecodeBuffers(buckets[-1], num_blocks, cache.block_size, loaded.device)
        self._logits: Tensor | None = None
        self._graphs: dict[int, _Graph] = {}

    def can_run(self, items: Items[ScheduledSequence]) -> bool:
        """Return True if all `items` are decodes that sample without prompt scoring, and a bucket holds them."""
        return len(items) <= self._buckets[-1] and all(
            item.num_tokens == 1 and item.samples and not wants_prompt_logprobs(item) for item in items
        )

    def send(
        self, items: Items[ScheduledSequence], last_sampled: LastSampledTokens, to_device: HostToDeviceBuffer
    ) -> SentDecodes:
        """Add the inputs of a pass over `items` to `to_device`.

        The device takes ids that the host does not know from `last_sampled`.
        """
        bucket = self._buckets[bisect_left(self._buckets, len(items))]
        return self._buffers.send(items, bucket, last_sampled, to_device)

    def run(self, sent: SentDecodes, on_device: DeviceBuffer) -> DecodeOutputs:
        """Run a pass over the sent inputs and return its outputs: one row per item, then the rows of the padding."""
        self._buffers.load(sent, on_device)
        graph = self._graphs.get(sent.num_rows)
        return self._compute(sent.num_rows) if graph is None else graph.replay()

    @torch.inference_mode()
    def capture(self, stream: torch.cuda.Stream) -> bool:
        """Capture a graph for every bucket. The largest is the first, and the smaller ones share its memory.

        All captures of a process use one `stream`: cuBLAS keeps a workspace for each stream that it has met. Returns
        False, and keeps no graph, if a capture fails: for example if the model's code reads a value back from the
        device.

        Raises:
            ModelLoadError: the device has too little memory for the graphs.
        """
        device = self._loaded.device
        started_s, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        try:
            for bucket in reversed(self._buckets):
                self._graphs[bucket] = self._capture_one(bucket, pool, stream)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"the CUDA graphs of {self._buckets[-1]} sequences (max_num_seqs) do not fit the memory of {device}; "
                f"choose a smaller max_num_seqs or gpu_memory_utilization, or enforce_eager=true: {error}"
            ) from error
        except Exception as error:  # The errors of Triton and torch have no other common class.
            self._graphs.clear()
            _log.warning("decodes run without CUDA graphs, and small batches are slower: %s", error)
            return False
        taken = (free_before - torch.cuda.mem_get_info(device)[0]) / _MEBIBYTE
        duration_s = time.monotonic() - started_s
        _log.info("captured %d CUDA graphs in %.1f s and %.0f MiB", len(self._graphs), duration_s, taken)
        return True

    def _capture_one(self, bucket: int, pool: Any, stream: torch.cuda.Stream) -> _Graph:
        device = self._loaded.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._compute(bucket)  # The first run compiles kernels and allocates workspaces.
            with _refusing_to_wait():
                self._compute(bucket)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = self._compute(bucket)
        return _Graph(graph, outputs)

    def _compute(self, num_rows: int) -> DecodeOutputs:
        inputs = self._buffers.inputs(num_rows)
        context = self._attention(self._cache, inputs.slots, inputs.plan)
        logits = self._keep(self._loaded.logits(context, inputs.input_ids, inputs.position_ids, rows=0))
        # In the logits' own type: their order in float32 is the same, and a copy would take twice their memory.
        return DecodeOutputs(logits, sample_greedy(logits))

    def _keep(self, logits: Tensor) -> Tensor:
        """Copy `logits` into the buffer that all buckets share: kept apart, they would take several times its size."""
        if self._logits is None:
            self._logits = logits.new_empty(self._buckets[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise an error if the host waits for the device.

    A capture that fails midway would leave torch's allocator in its capture state, so a trial run must fail first.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True, slots=True)
class _Graph:
    """Captured pass and its output tensors, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    outputs: DecodeOutputs

    def replay(self) -> DecodeOutputs:
        self.graph.replay()
        return self.outputs
