"""Small operations of a decoder layer in Triton's kernels: one launch each instead of several in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from torch import Tensor

from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.float8_linear import round_rows
from replicas.model.layers.ops import HeadLayout, LayerOps, Norm, RotaryCosSin, TorchLayerOps
from replicas.model.layers.triton_kernels import (
    add_and_normalize_kernel,
    embed_kernel,
    rotary_embedding_kernel,
    silu_and_mul_kernel,
)

# Numbers that one program computes.
_TILE_NUMBERS = 1024
_EXACT = TorchLayerOps()


class TritonLayerOps:
    """`LayerOps` in Triton's kernels, for contiguous tensors."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `LayerOps`."""
        assert token_ids.is_contiguous() and table.is_contiguous()
        size = table.shape[1]
        output = table.new_empty(len(token_ids), size)
        if len(token_ids):
            grid = (len(token_ids), triton.cdiv(size, _TILE_NUMBERS))
            embed_kernel[grid](token_ids, table, output, len(table), SIZE=size, TILE=_TILE_NUMBERS)
        return output

    def add_and_normalize(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """See `LayerOps`."""
        output = torch.empty_like(residual)
        _add_and_normalize(residual, update, norm, output, None)
        return output

    def add_normalize_and_round(self, residual: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `LayerOps`."""
        output = torch.empty_like(residual, dtype=torch.uint8)
        scales = residual.new_empty(len(residual), dtype=torch.float32)
        _add_and_normalize(residual, update, norm, output, scales)
        return output.view(torch.float8_e4m3fn), scales

    def rotary_embedding(self, rows: Tensor, layout: HeadLayout, cos_sin: RotaryCosSin) -> None:
        """See `LayerOps`."""
        cos, sin = cos_sin.cos.contiguous(), cos_sin.sin.contiguous()
        assert rows.is_contiguous()
        assert (layout.query_norm is None) == (layout.key_norm is None), "both parts are normalised, or none is"
        half_width = int(triton.next_power_of_2(layout.size // 2))
        tile_heads = max(1, _TILE_NUMBERS // 2 // half_width)
        num_rotated = layout.num_query_heads + layout.num_kv_heads
        if len(rows):
            rotary_embedding_kernel[(len(rows), triton.cdiv(num_rotated, tile_heads))](
                rows,
                cos,
                sin,
                rows if layout.query_norm is None else layout.query_norm.weight,
                rows if layout.key_norm is None else layout.key_norm.weight,
                0.0 if layout.query_norm is None else layout.query_norm.epsilon,
                NUM_QUERY_HEADS=layout.num_query_heads,
                NUM_KV_HEADS=layout.num_kv_heads,
                SIZE=layout.size,
                HALF_WIDTH=half_width,
                TILE_HEADS=tile_heads,
                HAS_NORMS=layout.query_norm is not None,
            )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        assert gate_up.is_contiguous()
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        if num_rows:
            grid = (num_rows, triton.cdiv(size, _TILE_NUMBERS))
            silu_and_mul_kernel[grid](gate_up, output, SIZE=size, TILE=_TILE_NUMBERS)
        return output


def _add_and_normalize(
    residual: Tensor, update: Tensor | None, norm: Norm, output: Tensor, scales: Tensor | None
) -> None:
    """Write the normalised sum to `output`; with `scales`, rounded to e4m3."""
    assert residual.is_contiguous() and (update is None or update.is_contiguous())
    num_rows, size = residual.shape
    if num_rows:
        width = int(triton.next_power_of_2(size))
        add_and_normalize_kernel[(num_rows,)](
            residual,
            residual if update is None else update,
            norm.weight,
            output,
            output if scales is None else scales,
            norm.epsilon,
            SIZE=size,
            WIDTH=width,
            HAS_UPDATE=update is not None,
            IS_ROUNDED=scales is not None,
            num_warps=min(16, max(1, width // 512)),
        )


def check_layer_ops(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a description of the kernels' first fault; None if there is none.

    The check's row sizes are no powers of two, so it also covers masked columns.
    """
    return find_fault(_errors(TritonLayerOps(), dtype, device), dtype)


@torch.inference_mode()
def _errors(ops: LayerOps, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield the error of each operation against plain torch in float32 over the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    table, token_ids = draw(7, 1100), torch.tensor([6, 0, 7, -1, 3], device=device)
    rows, expected = ops.embed(token_ids, table), _EXACT.embed(token_ids, table)
    is_same = torch.equal(rows.nan_to_num(), expected.nan_to_num()) and torch.equal(rows.isnan(), expected.isnan())
    yield "embed", 0.0 if is_same else torch.inf
    norm = Norm(draw(96), 1e-5)
    residual, update = draw(5, 96), draw(5, 96)
    sums = (residual.float() + update.float()).to(dtype).float()
    normalized = ops.add_and_normalize(residual, update, norm)
    yield "add_and_normalize", relative_error(residual.float(), sums)
    yield "add_and_normalize", relative_error(normalized.float(), _EXACT.add_and_normalize(sums, None, _exact(norm)))
    both = (ops.add_normalize_and_round(residual, None, norm), round_rows(normalized))
    products = [numbers.float() * scales[:, None] for numbers, scales in both]
    yield "add_normalize_and_round", relative_error(*products)
    angles = draw(5, 12).float().repeat(1, 2)
    cos_sin = RotaryCosSin(angles.cos().to(dtype), angles.sin().to(dtype))
    plain = HeadLayout(5, 2, 24, None, None)
    with_norms = replace(plain, query_norm=Norm(draw(24), 1e-6), key_norm=Norm(draw(24), 1e-6))
    for name, layout in (("rotary_embedding", plain), ("norms and rotary_embedding", with_norms)):
        yield name, _rotation_error(ops, draw(5, 9 * 24), layout, cos_sin)
    gate_up = draw(5, 2 * 1100)
    yield "silu_and_mul", relative_error(ops.silu_and_mul(gate_up).float(), _EXACT.silu_and_mul(gate_up.float()))


def _rotation_error(ops: LayerOps, rows: Tensor, layout: HeadLayout, cos_sin: RotaryCosSin) -> float:
    expected = rows.to(torch.float32, copy=True)
    norms = (norm and _exact(norm) for norm in (layout.query_norm, layout.key_norm))
    exact_layout = HeadLayout(layout.num_query_heads, layout.num_kv_heads, layout.size, *norms)
    _EXACT.rotary_embedding(expected, exact_layout, RotaryCosSin(cos_sin.cos.float(), cos_sin.sin.float()))
    ops.rotary_embedding(rows, layout, cos_sin)
    return relative_error(rows.float(), expected)


def _exact(norm: Norm) -> Norm:
    return Norm(norm.weight.float(), norm.epsilon)
