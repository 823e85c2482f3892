"""Attention without torch's fused kernels, for softcaps, sinks and unequal head sizes of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.model.attention.interface import Scoring

# Scores held at once, in elements. It bounds the memory.
_MAX_SCORES = 1 << 24


def attend_dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute attention with float32 scores, for a slice of the queries at a time.

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
