"""A layer's small operations in Triton's kernels: one launch each, where plain torch takes several."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from replicas.model.layer_math import HeadLayout, LayerMath, Norm, Rotation, TorchLayerMath
from replicas.model.triton_layer_kernels import add_and_normalize_kernel, gate_kernel, rotate_kernel

# Numbers that a program computes at once.
_TILE_NUMBERS = 1024
# Of any number against plain torch in float32; what is wrong differs by about 1.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class TritonLayerMath:
    """`LayerMath` in Triton's kernels, over tensors whose numbers lie side by side."""

    def add_and_normalize(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """See `LayerMath`."""
        assert residual.is_contiguous() and (update is None or update.is_contiguous())
        output = torch.empty_like(residual)
        num_rows, size = residual.shape
        if num_rows:
            width = int(triton.next_power_of_2(size))
            add_and_normalize_kernel[(num_rows,)](
                residual,
                residual if update is None else update,
                norm.weight,
                output,
                norm.epsilon,
                SIZE=size,
                WIDTH=width,
                HAS_UPDATE=update is not None,
                num_warps=min(16, max(1, width // 512)),
            )
        return output

    def rotate(self, rows: Tensor, layout: HeadLayout, rotation: Rotation) -> None:
        """See `LayerMath`."""
        cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
        assert rows.is_contiguous()
        assert (layout.query_norm is None) == (layout.key_norm is None), "both parts are normalised, or none is"
        half_width = int(triton.next_power_of_2(layout.size // 2))
        tile_heads = max(1, _TILE_NUMBERS // 2 // half_width)
        num_rotated = layout.num_query_heads + layout.num_kv_heads
        if len(rows):
            rotate_kernel[(len(rows), triton.cdiv(num_rotated, tile_heads))](
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

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `LayerMath`."""
        assert gate_up.is_contiguous()
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        if num_rows:
            grid = (num_rows, triton.cdiv(size, _TILE_NUMBERS))
            gate_kernel[grid](gate_up, output, SIZE=size, TILE=_TILE_NUMBERS)
        return output


def check_layer_math(dtype: torch.dtype, device: torch.device, math: LayerMath | None = None) -> str | None:
    """What is wrong with the kernels, or with `math`, in words; None: nothing. Sizes are of no power of two."""
    math = math or TritonLayerMath()
    # Whatever compiler, driver and device may raise: plain torch needs none of it.
    try:
        differences = _differences(math, dtype, device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for operation, difference in differences.items():
        if not difference <= _TOLERANCES[dtype]:  # Also if it is no number.
            return f"{operation} in {dtype} differs from plain torch by {difference:.1e}"
    return None


@torch.inference_mode()
def _differences(math: LayerMath, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """By operation, the largest difference from plain torch in float32 over the same numbers."""
    generator, exact = torch.Generator().manual_seed(0), TorchLayerMath()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def largest(found: Tensor, expected: Tensor) -> float:
        return float((found.float() - expected).abs().amax())

    differences = {}
    norm, plain_norm = _both(draw(96), 1e-5)
    residual, update = draw(5, 96), draw(5, 96)
    sums = (residual.float() + update.float()).to(dtype)
    normalized = math.add_and_normalize(residual, update, norm)
    differences["add_and_normalize"] = max(
        largest(residual, sums.float()), largest(normalized, exact.add_and_normalize(sums.float(), None, plain_norm))
    )
    angles = draw(5, 12).float().repeat(1, 2)
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    plain = HeadLayout(5, 2, 24, None, None)
    query_norm, plain_query_norm = _both(draw(24), 1e-6)
    key_norm, plain_key_norm = _both(draw(24), 1e-6)
    layouts = {
        "rotate": (plain, plain),
        "normalize and rotate": (
            replace(plain, query_norm=query_norm, key_norm=key_norm),
            replace(plain, query_norm=plain_query_norm, key_norm=plain_key_norm),
        ),
    }
    for name, (layout, exact_layout) in layouts.items():
        rows = draw(5, 9 * 24)
        expected = rows.to(torch.float32, copy=True)
        exact.rotate(expected, exact_layout, Rotation(rotation.cos.float(), rotation.sin.float()))
        math.rotate(rows, layout, rotation)
        differences[name] = largest(rows, expected)
    gate_up = draw(5, 2 * 1100)
    differences["gate"] = largest(math.gate(gate_up), exact.gate(gate_up.float()))
    return differences


def _both(weight: Tensor, epsilon: float) -> tuple[Norm, Norm]:
    return Norm(weight, epsilon), Norm(weight.float(), epsilon)
