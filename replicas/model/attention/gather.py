"""Attention backend in plain torch: gather the blocks, then scaled dot product. It runs on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replicas.model.attention.interface import AttentionCall, Scoring
from replicas.model.attention.kv_cache import KVCache, LayerCache
from replicas.model.batch.inputs import BatchInputs, Chunk

# Slots of one group of decodes. It bounds the copy of their keys and values.
_MAX_GATHERED_SLOTS = 1 << 17
# Sequences of at most this many blocks share a group, however unequal: padding costs less than another call.
_SHORT_BLOCKS = 16
# Scores held at once, in elements. It bounds the memory.
_MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Decodes of similar length, whose blocks are gathered together."""

    rows: Tensor  # [num_chunks] int64: rows in the flat batch
    table: Tensor  # [num_chunks * max_blocks] int64
    mask: Tensor
    """[num_chunks, 1, 1, max_blocks * block_size] bool: the gathered slots that the token sees; at least its own."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Chunk of several tokens. Without a table, the chunk sees only its own keys and values, causally.

    With 8 bits in the cache there is always a table: a token sees the same numbers in any chunk.
    """

    rows: slice
    table: Tensor | None  # [num_blocks] int64
    mask: Tensor | None  # [num_tokens, num_slots] bool; None: causal


_Plan = tuple[list[_Decodes], list[_Prefill]]


class GatherAttention:
    """Attention of one forward pass. Layers of the same window share a plan of tables and masks."""

    kernels = "plain torch"

    def __init__(self, cache: KVCache, inputs: BatchInputs) -> None:
        self._cache = cache
        self._inputs = inputs
        self._plans: dict[int | None, _Plan] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's keys and values, and return its output [num_tokens, num_query_heads, value_size]."""
        layer = self._cache[call.layer]
        if self._inputs.partial_blocks is not None:
            layer.clear(self._inputs.partial_blocks)
        layer.write(self._inputs.slots, call.key, call.value)
        if call.window not in self._plans:
            self._plans[call.window] = self._plan(call.window)
        decodes, prefills = self._plans[call.window]
        num_tokens, num_heads, _ = call.query.shape
        output = call.query.new_empty(num_tokens, num_heads, call.value.shape[2])
        for group in decodes:
            output.index_copy_(0, group.rows, _attend_decodes(call, layer, group))
        for prefill in prefills:
            output[prefill.rows] = _attend_prefill(call, layer, prefill)
        return output

    def _plan(self, window: int | None) -> _Plan:
        singles = [chunk for chunk in self._inputs.chunks if chunk.num_tokens == 1]
        return (
            [self._decodes(group, window) for group in self._group(singles, window)],
            [self._prefill(chunk, window) for chunk in self._inputs.chunks if chunk.num_tokens > 1],
        )

    def _group(self, chunks: list[Chunk], window: int | None) -> list[list[Chunk]]:
        """Return the chunks in groups, longest first; members of a group have at least half of the padded length.

        Groups of short sequences may be more unequal.
        """
        groups: list[list[Chunk]] = []
        longest = 0
        for chunk in sorted(chunks, key=lambda chunk: -len(self._blocks(chunk, window))):
            num_blocks = len(self._blocks(chunk, window))
            num_slots = longest * self._cache.block_size * (len(groups[-1]) + 1) if groups else 0
            is_similar = 2 * num_blocks >= longest or longest <= _SHORT_BLOCKS
            if not groups or not is_similar or num_slots > _MAX_GATHERED_SLOTS:
                groups.append([])
                longest = num_blocks
            groups[-1].append(chunk)
        return groups

    def _decodes(self, chunks: list[Chunk], window: int | None) -> _Decodes:
        tables = [self._blocks(chunk, window) for chunk in chunks]
        num_blocks = len(tables[0])
        # Pad with a sequence's own last block: a sequence reads only its own blocks, even under the mask.
        padded = [table + table[-1:] * (num_blocks - len(table)) for table in tables]
        block_size = self._cache.block_size
        firsts = [self._first_block(chunk, window) * block_size for chunk in chunks]
        # A token sees the slots [low, high), counted from the first gathered slot.
        lows = [_first_visible(chunk, window) - first for chunk, first in zip(chunks, firsts, strict=True)]
        highs = [chunk.end - first for chunk, first in zip(chunks, firsts, strict=True)]
        bounds = self._tensor([[chunk.row for chunk in chunks], lows, highs])
        slots = torch.arange(num_blocks * block_size, device=bounds.device)
        mask = (slots >= bounds[1, :, None]) & (slots < bounds[2, :, None])
        return _Decodes(bounds[0], self._tensor(padded).flatten(), mask[:, None, None])

    def _prefill(self, chunk: Chunk, window: int | None) -> _Prefill:
        rows = slice(chunk.row, chunk.row + chunk.num_tokens)
        if chunk.start == 0 and (window is None or chunk.end <= window) and not self._cache.is_quantized:
            return _Prefill(rows, None, None)
        table = self._tensor(self._blocks(chunk, window))
        first = self._first_block(chunk, window) * self._cache.block_size
        keys = torch.arange(first, first + len(table) * self._cache.block_size, device=table.device)
        queries = torch.arange(chunk.start, chunk.end, device=table.device)[:, None]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        return _Prefill(rows, table, mask)

    def _first_block(self, chunk: Chunk, window: int | None) -> int:
        return _first_visible(chunk, window) // self._cache.block_size

    def _blocks(self, chunk: Chunk, window: int | None) -> list[int]:
        """Return the blocks that tokens of the chunk see."""
        num_blocks = -(-chunk.end // self._cache.block_size)
        return chunk.block_table[self._first_block(chunk, window) : num_blocks].tolist()

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._inputs.slots.device, non_blocking=True)


def _first_visible(chunk: Chunk, window: int | None) -> int:
    """Return the earliest position that the chunk's first token sees."""
    return 0 if window is None else max(0, chunk.start + 1 - window)


def _attend_decodes(call: AttentionCall, layer: LayerCache, decodes: _Decodes) -> Tensor:
    """Return the group's output, [num_chunks, num_query_heads, value_size]."""
    query = call.query.index_select(0, decodes.rows)
    num_chunks, num_heads, key_size = query.shape
    keys, values = (
        part.view(num_chunks, -1, *part.shape[2:]).transpose(1, 2) for part in layer.read(decodes.table, query.dtype)
    )
    if _needs_dense(call):
        output = attend_dense(query[:, :, None], keys, values, decodes.mask, call.scoring)
    else:
        # Pack the query heads of one KV head as rows, so the keys need no copy per query head.
        packed = query.view(num_chunks, keys.shape[1], -1, key_size)
        output = functional.scaled_dot_product_attention(
            packed, keys, values, attn_mask=decodes.mask, scale=call.scoring.scale
        )
    return output.reshape(num_chunks, num_heads, -1)


def _attend_prefill(call: AttentionCall, layer: LayerCache, prefill: _Prefill) -> Tensor:
    """Return the chunk's output, [num_tokens, num_query_heads, value_size]."""
    query = call.query[prefill.rows].transpose(0, 1)[None]
    if prefill.table is None:
        keys, values = call.key[prefill.rows], call.value[prefill.rows]
    else:
        keys, values = (part.flatten(0, 1) for part in layer.read(prefill.table, query.dtype))
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if _needs_dense(call):
        output = attend_dense(query, keys, values, prefill.mask, call.scoring)
    else:
        # Repeat the heads instead of `enable_gqa`: no CUDA kernel has both that and a mask, so torch would store all
        # scores.
        group_size = query.shape[1] // keys.shape[1]
        output = functional.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(group_size, dim=1),
            values.repeat_interleave(group_size, dim=1),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
            scale=call.scoring.scale,
        )
    return output[0].transpose(0, 1)


def _needs_dense(call: AttentionCall) -> bool:
    """Return True if torch's fused attention cannot compute the call, or only with unbounded memory."""
    return (
        call.scoring.softcap is not None or call.scoring.sinks is not None or call.query.shape[2] != call.value.shape[2]
    )


def attend_dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute attention with float32 scores, without torch's fused kernels, for a slice of the queries at a time.

    Args:
        query: [num_chunks, num_query_heads, num_tokens, key_size]
        keys: [num_chunks, num_kv_heads, num_slots, key_size]
        values: [num_chunks, num_kv_heads, num_slots, value_size]
        mask: bool, broadcastable to [num_chunks, 1, num_tokens, num_slots]; every token sees a slot. None: causal;
            tokens and slots are the same positions.
        scoring: the parameters of the scores.

    Returns:
        [num_chunks, num_query_heads, num_tokens, value_size]
    """
    num_chunks, num_heads, num_tokens, _ = query.shape
    num_slots = keys.shape[2]
    if mask is None:
        mask = torch.ones(num_tokens, num_slots, dtype=torch.bool, device=query.device).tril()
    slice_tokens = max(1, _MAX_SCORES // (num_chunks * num_heads * num_slots))
    outputs = [
        _attend_slice(
            query[:, :, first : first + slice_tokens],
            keys,
            values,
            mask[..., first : first + slice_tokens, :],
            scoring,
        )
        for first in range(0, num_tokens, slice_tokens)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_slice(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    num_chunks, num_heads, num_tokens, key_size = query.shape
    num_kv_heads = keys.shape[1]
    # Pack the query heads of one KV head as rows, so the keys need no copy per query head.
    packed = query.reshape(num_chunks, num_kv_heads, -1, key_size)
    scores = (packed @ keys.transpose(2, 3)).view(num_chunks, num_heads, num_tokens, -1).float() * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        sink_scores = scoring.sinks.float().view(1, -1, 1, 1).expand(num_chunks, -1, num_tokens, 1)
        weights = torch.softmax(torch.cat([scores, sink_scores], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    packed_weights = weights.to(values.dtype).reshape(num_chunks, num_kv_heads, -1, keys.shape[2])
    return (packed_weights @ values).view(num_chunks, num_heads, num_tokens, -1)
