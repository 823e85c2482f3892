"""Decodes at a few fixed batch sizes, captured in CUDA graphs: one launch instead of hundreds."""

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
from replicas.model.attention import AttentionContext
from replicas.model.batch_inputs import Sampled, wants_prompt_logprobs
from replicas.model.decode_buffers import DecodeBuffers, SentDecodes
from replicas.model.kv_cache import KVCache
from replicas.model.loader import LoadedModel
from replicas.model.sampler import Choice, likeliest
from replicas.model.transfers import Outbox, Placed
from replicas.model.triton_tiles import TilePlan

_log = logging.getLogger(__name__)

PlannedAttention = Callable[[KVCache, Tensor, TilePlan], AttentionContext]
"""Attention by a plan whose tensors outlive the pass: cache, slots [num_tokens] int64, plan."""
_MEBIBYTE = 2**20


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, then at most 8 rows or a quarter more than the one before, to the largest."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, size // 4 // 8 * 8)
    return (*sizes, max_num_seqs)


@dataclass(frozen=True, slots=True)
class DecodeOutputs:
    """What a pass over decodes gives, one row each; the next pass overwrites it."""

    logits: Tensor
    """[num_rows, vocab_size] in the model's dtype"""
    greedy: Choice

    def first(self, num_rows: int) -> DecodeOutputs:
        """The first rows."""
        greedy = Choice(self.greedy.tokens[:num_rows], self.greedy.is_sound[:num_rows])
        return DecodeOutputs(self.logits[:num_rows], greedy)


class PaddedDecodes:
    """Batches of decodes, padded to the next bucket with rows that belong to nobody.

    A graph holds the whole forward pass and the greedy choice. Buckets without a graph run the same code as it is.
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
        self._graphs: dict[int, _Graph] = {}

    def takes(self, items: Items[ScheduledSequence]) -> bool:
        """Whether all `items` are decodes and there is a bucket for so many."""
        return len(items) <= self._buckets[-1] and all(
            item.num_tokens == 1 and item.samples and not wants_prompt_logprobs(item) for item in items
        )

    def send(self, items: Items[ScheduledSequence], sampled: Sampled, outbox: Outbox) -> SentDecodes:
        """Send what a pass over `items` needs. Ids that the host does not know the step before `sampled`."""
        bucket = self._buckets[bisect_left(self._buckets, len(items))]
        return self._buffers.send(items, bucket, sampled, outbox)

    def run(self, sent: SentDecodes, placed: Placed) -> DecodeOutputs:
        """What was sent, computed: one row per item, then rows of nobody."""
        self._buffers.load(sent, placed)
        graph = self._graphs.get(sent.num_rows)
        return self._compute(sent.num_rows) if graph is None else graph.replay()

    @torch.inference_mode()
    def capture(self) -> bool:
        """Capture a graph for every bucket, the largest first, so that the smaller ones share its memory.

        Returns False, and leaves no graph, where the model's code cannot be captured (it asks the device for
        something that decides what is launched next).
        """
        device = self._loaded.device
        started_s, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        try:
            for bucket in reversed(self._buckets):
                self._graphs[bucket] = self._capture_one(bucket, pool)
        except Exception as error:  # Triton's and torch's own errors have nothing in common.
            self._graphs.clear()
            _log.warning("decoding without CUDA graphs, which is slower in small batches: %s", error)
            return False
        taken = (free_before - torch.cuda.mem_get_info(device)[0]) / _MEBIBYTE
        duration_s = time.monotonic() - started_s
        _log.info("captured %d CUDA graphs in %.1f s and %.0f MiB", len(self._graphs), duration_s, taken)
        return True

    def _capture_one(self, bucket: int, pool: Any) -> _Graph:
        device = self._loaded.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._compute(bucket)  # Compiles kernels and allocates workspaces.
            with _refusing_to_wait():
                self._compute(bucket)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = self._compute(bucket)
        return _Graph(graph, outputs)

    def _compute(self, num_rows: int) -> DecodeOutputs:
        inputs = self._buffers.inputs(num_rows)
        context = self._attention(self._cache, inputs.slots, inputs.plan)
        logits = self._loaded.logits(context, inputs.input_ids, inputs.position_ids, rows=0)
        return DecodeOutputs(logits, likeliest(logits.float()))


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise where the host would wait for the device: a capture that fails half-way leaves torch's allocator in it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured pass, and the tensors that each replay fills anew."""

    graph: torch.cuda.CUDAGraph
    outputs: DecodeOutputs

    def replay(self) -> DecodeOutputs:
        self.graph.replay()
        return self.outputs
