"""Small operations of a decoder layer (norms, rotary embedding, SwiGLU gating), in plain torch and in C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from replicas.model.layers.float8_linear import round_rows


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square normalisation over the last dimension.

    `weight` [size] is a copy of the model's: a view of a few numbers would keep a whole file of the checkpoint mapped.
    """

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Layout of one row [(num_query_heads + 2 * num_kv_heads) * size]: queries, then keys, then values."""

    num_query_heads: int
    num_kv_heads: int
    size: int
    query_norm: Norm | None
    """Norm [size] of each query head before its rotation; None: not normalised."""
    key_norm: Norm | None
    """Norm [size] of each key head before its rotation; None: not normalised."""


@dataclass(frozen=True, slots=True)
class RotaryCosSin:
    """Cosine and sine of each token's angles; the second half of each row repeats the first."""

    cos: Tensor  # [num_tokens, size]
    sin: Tensor  # [num_tokens, size]


class LayerOps(Protocol):
    """Operations on tensors of one dtype on one device."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return the rows of `table` [vocab_size, size] for `token_ids` [num_tokens] int64; NaN for an id outside."""

    def add_and_normalize(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """Add `update` to `residual` [num_tokens, size] in place, and return the normalised sum."""

    def add_normalize_and_round(self, residual: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Do as `add_and_normalize`, and return its result as a `RowRounding` does: in e4m3, and the rows' scales."""

    def rotary_embedding(self, rows: Tensor, layout: HeadLayout, cos_sin: RotaryCosSin) -> None:
        """Apply the layout's norms and the rotary embedding to the queries and keys of `rows`, in place."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half) * second half of each row, [num_tokens, size / 2]."""


class TorchLayerOps:
    """`LayerOps` in plain torch."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `LayerOps`."""
        known = token_ids.clamp(0, len(table) - 1)
        return with_unknown_as_nan(functional.embedding(known, table), token_ids == known)

    def add_and_normalize(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """See `LayerOps`."""
        if update is not None:
            residual.add_(update)
        return functional.rms_norm(residual, norm.weight.shape, norm.weight, norm.epsilon)

    def add_normalize_and_round(self, residual: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `LayerOps`."""
        return round_rows(self.add_and_normalize(residual, update, norm))

    def rotary_embedding(self, rows: Tensor, layout: HeadLayout, cos_sin: RotaryCosSin) -> None:
        """See `LayerOps`."""
        num_rotated = layout.num_query_heads + layout.num_kv_heads
        heads = rows.view(len(rows), -1, layout.size)[:, :num_rotated]
        queries, keys = heads[:, : layout.num_query_heads], heads[:, layout.num_query_heads :]
        for part, norm in ((queries, layout.query_norm), (keys, layout.key_norm)):
            if norm is not None:
                part.copy_(functional.rms_norm(part, norm.weight.shape, norm.weight, norm.epsilon))
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        heads.mul_(cos_sin.cos[:, None]).addcmul_(turned, cos_sin.sin[:, None])

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def with_unknown_as_nan(embeddings: Tensor, is_known: Tensor) -> Tensor:
    """Return `embeddings` [..., size] with NaN in the rows where `is_known` [...] is false."""
    return embeddings.masked_fill(~is_known[..., None], torch.nan)


class CppLayerOps:
    """`LayerOps` in the compiled kernels, which must be loaded."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `LayerOps`."""
        return TorchLayerOps().embed(token_ids, table)

    def add_and_normalize(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """See `LayerOps`."""
        output: Tensor = torch.ops.headway.add_and_normalize.default(residual, update, norm.weight, norm.epsilon)
        return output

    def add_normalize_and_round(self, residual: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `LayerOps`."""
        return round_rows(self.add_and_normalize(residual, update, norm))

    def rotary_embedding(self, rows: Tensor, layout: HeadLayout, cos_sin: RotaryCosSin) -> None:
        """See `LayerOps`."""
        query_norm, key_norm = layout.query_norm, layout.key_norm
        torch.ops.headway.rotate_heads.default(
            rows,
            cos_sin.cos,
            cos_sin.sin,
            layout.num_query_heads,
            layout.num_kv_heads,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.epsilon,
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        output: Tensor = torch.ops.headway.gate_rows.default(gate_up)
        return output
