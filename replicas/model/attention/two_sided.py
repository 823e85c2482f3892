"""Attention in which a token sees those before and behind it: a text is whole in one step, so it needs no cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from replicas.model.attention.interface import AttentionCall
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.inputs import BatchInputs


class TwoSidedAttention:
    """Attention of one forward pass over whole texts, whose keys and values are those of the pass."""

    kernels = "plain torch, two-sided"

    def __init__(self, cache: KVCache, inputs: BatchInputs) -> None:
        """`cache` has no layers."""
        self._chunks = inputs.chunks
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the call's output [num_tokens, num_query_heads, value_size]."""
        num_tokens, num_heads, _ = call.query.shape
        output = call.query.new_empty(num_tokens, num_heads, call.value.shape[2])
        for chunk in self._chunks:
            rows = slice(chunk.row, chunk.row + chunk.num_tokens)
            query, key, value = (part[rows].transpose(0, 1)[None] for part in (call.query, call.key, call.value))
            attended = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=self._mask(chunk.num_tokens, call.window, call.query.device),
                scale=call.scoring.scale,
                enable_gqa=True,
            )
            output[rows] = attended[0].transpose(0, 1)
        return output

    def _mask(self, num_tokens: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the tokens that each token sees, [num_tokens, num_tokens] bool; None: all."""
        if window is None or num_tokens <= window:
            return None
        key = (num_tokens, window)
        if key not in self._masks:
            places = torch.arange(num_tokens, device=device)
            self._masks[key] = (places[:, None] - places).abs() < window
        return self._masks[key]
