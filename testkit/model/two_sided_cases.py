"""Batches of whole texts, compared with two-sided attention by definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.attention.interface import AttentionBackend, AttentionCall, Scoring
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.inputs import build_inputs, dummy_item

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TwoSidedCase:
    """Texts of these lengths in one batch, and the attention layer's shape."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    window: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.sizes[0])

    def largest_error(self, attention: AttentionBackend, device: torch.device) -> float:
        """Return the largest error of an output number, divided by the expected value or by 1 if that is larger."""
        errors = []
        for index, output in enumerate(self.outputs(attention, device)):
            expected = self._expected(*self._drawn(index, device))
            errors.append(((output.double() - expected).abs() / expected.abs().clamp(min=1)).max())
        return float(torch.stack(errors).amax())

    def outputs(
        self, attention: AttentionBackend, device: torch.device, texts: tuple[int, ...] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the output of each of `texts`, by index; None: of all. They are in one batch."""
        chosen = range(len(self.lengths)) if texts is None else texts
        drawn = [self._drawn(index, device) for index in chosen]
        # Heads before tokens in memory, as in many models.
        query, key, value = (
            torch.cat(parts).transpose(0, 1).contiguous().transpose(0, 1) for parts in zip(*drawn, strict=True)
        )
        lengths = [self.lengths[index] for index in chosen]
        inputs = build_inputs([dummy_item(0, length, _BLOCK_SIZE) for length in lengths], _BLOCK_SIZE, device)
        call = AttentionCall(0, query, key, value, Scoring(self._scale), self.window, frozenset())
        context = attention(KVCache((), 0, _BLOCK_SIZE, self.dtype, device), inputs)
        return torch.split(context.attend(call), lengths)

    def _drawn(self, index: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of a text, [length, number of heads, size] each."""
        generator = torch.Generator().manual_seed(index)
        (num_heads, num_kv_heads), (key_size, value_size) = self.heads, self.sizes
        query, key, value = (
            torch.randn(self.lengths[index], *shape, generator=generator).to(device, self.dtype)
            for shape in ((num_heads, key_size), (num_kv_heads, key_size), (num_kv_heads, value_size))
        )
        return query, key, value

    def _expected(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group_size = self.heads[0] // self.heads[1]
        key, value = (part.double().repeat_interleave(group_size, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * self._scale
        places = torch.arange(len(query), device=query.device)
        visible = (places[:, None] - places).abs() < (self.window or len(query))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)
