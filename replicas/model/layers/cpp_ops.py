"""Small operations of a decoder layer in the compiled C++ kernels, on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.model.layers.interface import HeadLayout, Norm, RotaryCosSin


class CppLayerOps:
    """`LayerOps` in the compiled kernels, which must be loaded."""

    def add_and_normalize(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """See `LayerOps`."""
        output: Tensor = torch.ops.headway.add_and_normalize.default(residual, update, norm.weight, norm.epsilon)
        return output

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
