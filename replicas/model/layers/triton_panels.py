"""Products with weights in panels, in Triton's kernels; many rows use a widened copy of the weight, and torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from replicas.model.checkpoint.quantized_linear import FP4_VALUES, IQ4_VALUES, QuantizedLinear
from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.experts import Routing
from replicas.model.layers.panels import PANEL, PanelFormat, Panels, pack_panels, panel_linear
from replicas.model.layers.triton_experts import ProductTile
from replicas.model.layers.triton_kernels import add_parts_kernel
from replicas.model.layers.triton_panel_kernels import (
    panel_expert_kernel,
    panel_linear_kernel,
    round_rows_kernel,
    widen_kernel,
)

_SUM_TILE = 1024
_MOST_ROWS, _MOST_ROWS_OF_SLOW = 256, 64
"""Rows up to which weights are widened in registers."""
_SMALL_UNIT_BYTES = 16
_SCRATCH_NUMBERS = 2**27
"""Most numbers of a widened copy; a larger weight is widened in pieces."""
_MAX_PARTS = 16
_MIN_PART_UNITS, _MIN_PART_INPUTS = 4, 512
"""Least of a part: with less a pipeline does not fill."""
_NUM_TRIAL_OUTPUTS = 40
_MOST_WARPS, _WARP_NUMBERS = 16, 1024
"""Warps that round a row, and numbers of a row for each."""
INVARIANT_TILE = ProductTile(64, 64, 0, num_warps=4, num_stages=3)


@dataclass(frozen=True, slots=True)
class PanelDivision:
    """Programs of one product: their tile, and the units of a part of its sums."""

    tile: ProductTile
    num_parts: int
    part_units: int


def panel_tile(num_rows: int, itemsize: int) -> ProductTile:
    """Return the tile for products of `num_rows` rows of numbers of `itemsize` bytes; it fits every device since 2020.

    Its columns are outputs, and a step takes one unit.
    """
    if itemsize > 2:  # Exact products do not use the matrix units.
        return ProductTile(32, 32, 0, num_warps=4, num_stages=2)
    if num_rows <= 16:
        return ProductTile(16, 128, 0, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return ProductTile(32, 64, 0, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return ProductTile(64, 64, 0, num_warps=4, num_stages=3)
    return ProductTile(128, 128, 0, num_warps=8, num_stages=3)


def divide_panels(num_units: int, unit_inputs: int, out_size: int, num_rows: int, itemsize: int) -> PanelDivision:
    """Return the programs of a product: a pure function of the shape, equal on every replica.

    With few rows, sums are cut into parts until the programs have enough loads under way.
    """
    tile = panel_tile(num_rows, itemsize)
    num_programs = triton.cdiv(out_size, tile.columns) * triton.cdiv(num_rows, tile.rows)
    wanted = (512 if tile.rows <= 32 else 256) // num_programs
    most = max(1, min(_MAX_PARTS, wanted, num_units // max(_MIN_PART_UNITS, _MIN_PART_INPUTS // unit_inputs)))
    part_units = triton.cdiv(num_units, most)
    return PanelDivision(tile, triton.cdiv(num_units, part_units), part_units)


def expert_tile(num_pairs: int, num_experts: int, itemsize: int) -> ProductTile:
    """Return the tile for `num_pairs` rows among `num_experts` experts, with numbers of `itemsize` bytes."""
    return panel_tile(triton.cdiv(num_pairs, num_experts), itemsize)


def most_rows(panel_format: PanelFormat, unit_bytes: int) -> int:
    """Return the rows up to which weights are widened in registers; more rows multiply a widened copy.

    Small units have little work for each of their loads, and a table is read for each number.
    """
    is_slow = panel_format is PanelFormat.TABLE4 or unit_bytes <= _SMALL_UNIT_BYTES
    return _MOST_ROWS_OF_SLOW if is_slow else _MOST_ROWS


def row_division(size: int) -> tuple[int, int]:
    """Return the width of the program that rounds a row of `size` numbers, and its warps."""
    width = int(triton.next_power_of_2(size))
    return width, max(1, min(_MOST_WARPS, width // _WARP_NUMBERS))


class TritonPanels:
    """`PanelProducts` in Triton's kernels. All layers share one scratch for widened weights."""

    swept_rows: tuple[int, ...] = (1, 32, 64, _MOST_ROWS, _MOST_ROWS + 1)

    def __init__(self, device: torch.device, *, is_batch_invariant: bool = False) -> None:
        """Make products on `device`; if `is_batch_invariant`, all rows are computed in tiles of one size."""
        self.device = device
        self._is_batch_invariant = is_batch_invariant
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._no_numbers = torch.zeros(16, dtype=torch.bfloat16, device=device)

    def reserve(self, panels: Panels, dtype: torch.dtype) -> None:
        """See `PanelProducts`."""
        num_bytes = min(_SCRATCH_NUMBERS, panels.num_outputs * panels.num_inputs) * dtype.itemsize
        if not self._is_batch_invariant and num_bytes > len(self._scratch):
            # Before it is freed, so that no weight is put into its place.
            self._scratch = self._scratch.new_empty(num_bytes)

    def multiply(self, rows: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
        """See `PanelProducts`."""
        if len(rows) <= most_rows(panels.format, panels.unit_bytes) or self._is_batch_invariant:
            return self._multiply_small(rows, panels, bias)
        scratch = self._scratch.view(rows.dtype)
        step = len(scratch) // panels.num_inputs
        step = step if step >= panels.num_outputs else step // PANEL * PANEL
        pieces = []
        for first in range(0, panels.num_outputs, step):
            outputs = slice(first, min(first + step, panels.num_outputs))
            wide = scratch[: (outputs.stop - first) * panels.num_inputs].view(-1, panels.num_inputs)
            self._widen(panels, wide, first // PANEL)
            pieces.append(functional.linear(rows, wide, None if bias is None else bias[outputs]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def multiply_experts(
        self, rows: Tensor, panels: Panels, biases: Tensor | None, order: Tensor, starts: Tensor, top_k: int, *,
        is_first: bool,
    ) -> Tensor:  # fmt: skip
        """See `PanelProducts`. Weights are widened in registers for any number of rows."""
        num_pairs, num_experts, out_size = len(order), len(panels.numbers), panels.num_outputs
        tile = expert_tile(num_pairs, num_experts, rows.itemsize)
        if self._is_batch_invariant and rows.itemsize <= 2:
            tile = INVARIANT_TILE
        output = rows.new_empty(num_pairs, out_size)
        # Every expert with rows has a last tile that is not full, in the worst case.
        num_tiles = num_pairs // tile.rows + min(num_experts, num_pairs)
        panel_expert_kernel[(triton.cdiv(out_size, tile.columns), num_tiles)](
            rows,
            panels.numbers,
            panels.scales,
            self._or_none(panels.zero_points),
            self._or_none(panels.table),
            self._or_none(biases),
            output,
            order,
            starts,
            IN_SIZE=panels.num_inputs,
            OUT_SIZE=out_size,
            NUM_GROUPS=panels.num_groups,
            NUM_EXPERTS=num_experts,
            EXPERT_WIDTH=int(triton.next_power_of_2(num_experts)),
            TOP_K=top_k,
            IS_FIRST=is_first,
            FORMAT=panels.format.value,
            BYTES=panels.unit_bytes,
            GROUP=panels.group_size,
            MIDDLE=panels.middle,
            HAS_ZERO_POINTS=panels.zero_points is not None,
            HAS_BIAS=biases is not None,
            TILE_ROWS=tile.rows,
            TILE_COLUMNS=tile.columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return output

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `float8_linear.RowRounding`."""
        num_rows, size = rows.shape
        numbers, scales = rows.new_empty(rows.shape, dtype=torch.uint8), rows.new_empty(num_rows, dtype=torch.float32)
        width, num_warps = row_division(size)
        round_rows_kernel[(num_rows,)](rows, numbers, scales, SIZE=size, WIDTH=width, num_warps=num_warps)
        return numbers.view(torch.float8_e4m3fn), scales

    def widen(self, panels: Panels, dtype: torch.dtype) -> Tensor:
        """See `PanelProducts`."""
        wide = panels.scales.new_empty(panels.num_outputs, panels.num_inputs, dtype=dtype)
        self._widen(panels, wide, 0)
        return wide

    def _widen(self, panels: Panels, wide: Tensor, first_panel: int) -> None:
        """Write values of the weight from a panel on to `wide` [outputs, num_inputs]."""
        widen_kernel[(panels.numbers.shape[1], triton.cdiv(len(wide), PANEL))](
            panels.numbers,
            panels.scales,
            self._or_none(panels.zero_points),
            self._or_none(panels.table),
            wide,
            first_panel,
            panels.num_outputs,
            panels.num_inputs // 16,
            FORMAT=panels.format.value,
            BYTES=panels.unit_bytes,
            GROUP=panels.group_size,
            MIDDLE=panels.middle,
            HAS_ZERO_POINTS=panels.zero_points is not None,
        )

    def _multiply_small(self, rows: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
        num_rows, out_size, num_units = len(rows), panels.num_outputs, panels.numbers.shape[1]
        output = rows.new_empty(num_rows, out_size)
        if num_rows == 0:
            return output
        division = divide_panels(num_units, panels.unit_inputs, out_size, num_rows, rows.itemsize)
        if self._is_batch_invariant:
            tile = panel_tile(num_rows, rows.itemsize) if rows.itemsize > 2 else INVARIANT_TILE
            division = PanelDivision(tile, 1, num_units)
        tile, is_split = division.tile, division.num_parts > 1
        parts = output
        if is_split:
            parts = rows.new_empty(division.num_parts, num_rows, out_size, dtype=torch.float32)
        panel_linear_kernel[
            (triton.cdiv(out_size, tile.columns), triton.cdiv(num_rows, tile.rows), division.num_parts)
        ](
            rows,
            panels.numbers,
            panels.scales,
            self._or_none(panels.zero_points),
            self._or_none(panels.table),
            self._or_none(bias),
            parts,
            num_rows,
            out_size,
            panels.num_inputs // 16,
            division.part_units,
            FORMAT=panels.format.value,
            BYTES=panels.unit_bytes,
            GROUP=panels.group_size,
            HAS_ONE_GROUP=len(panels.scales) == 1,
            MIDDLE=panels.middle,
            HAS_ZERO_POINTS=panels.zero_points is not None,
            HAS_BIAS=bias is not None,
            IS_SPLIT=is_split,
            TILE_ROWS=tile.rows,
            TILE_COLUMNS=tile.columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if is_split:
            add_parts_kernel[(num_rows, triton.cdiv(out_size, _SUM_TILE))](
                parts, self._or_none(bias), output, num_rows, OUT_SIZE=out_size, NUM_PARTS=division.num_parts,
                HAS_BIAS=bias is not None, TILE=_SUM_TILE,
            )  # fmt: skip
        return output

    def _or_none(self, numbers: Tensor | None) -> Tensor:
        """Return `numbers`, or a tensor that a kernel does not read."""
        return self._no_numbers if numbers is None else numbers


def check_panels(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a description of the kernels' first fault in products of `dtype`; None: they give what torch gives."""
    return find_fault(_errors(dtype, device), dtype)


@torch.inference_mode()
def _errors(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, float]]:
    products = TritonPanels(device)
    generator = torch.Generator().manual_seed(0)
    for name, weight in _trial_weights(generator):
        dense = weight.dense(torch.float32)
        bias = torch.randn(len(dense), generator=generator).to(dtype)
        layer = panel_linear(products, weight, bias.to(device), dtype)
        yield f"a widened weight of {name}", relative_error(layer.weight.cpu(), weight.dense(dtype))
        for num_rows in (1, 40, _MOST_ROWS + 1):
            rows = torch.randn(num_rows, dense.shape[1], generator=generator).to(dtype)
            expected = functional.linear(rows.float(), dense, bias.float())
            yield f"a product with {name}", relative_error(layer(rows.to(device)).float().cpu(), expected)
        yield f"experts with {name}", _error_of_experts(products, weight, dtype)


def _error_of_experts(products: TritonPanels, weight: QuantizedLinear, dtype: torch.dtype) -> float:
    """Return the error of products of two tokens with one and two of three experts, which have parts of a weight."""
    parts = [weight.rows(first, first + _NUM_TRIAL_OUTPUTS) for first in (0, 8, 16)]
    panels = Panels.stack([pack_panels(part.to(products.device)) for part in parts])
    routing = Routing.of(torch.tensor([[2, 0], [2, 1]], device=products.device), len(parts))
    rows = torch.randn(2, panels.num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    dense = [part.dense(torch.float32) for part in parts]
    expected = torch.stack([dense[expert] @ rows[token].float() for token, expert in ((0, 2), (0, 0), (1, 2), (1, 1))])
    found = products.multiply_experts(
        rows.to(products.device), panels, None, routing.order, routing.starts, routing.top_k, is_first=True
    )
    return relative_error(found.float().cpu(), expected[routing.order.cpu()])


def _trial_weights(generator: torch.Generator) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield a small weight in each format. Its last unit is not full, and its last panel is not."""
    shape, group = (72, 1040), 32
    scales = torch.rand(shape[0], -(-shape[1] // group), generator=generator) + 0.5
    numbers = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    zero_points = numbers[:, : scales.shape[1]]
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    float8 = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    yield "int4", QuantizedLinear(numbers & 15, scales, zero_points & 15, 4, inputs_per_scale=group)
    float4 = torch.tensor(FP4_VALUES)
    yield "fp4", QuantizedLinear(numbers & 15, scales, None, 4, inputs_per_scale=group, table=float4)
    yield "4 bits of a table", QuantizedLinear(numbers & 15, scales, None, 4, inputs_per_scale=group, table=table)
    yield "int8", QuantizedLinear(numbers, scales, zero_points, 8, inputs_per_scale=group)
    yield "fp8", QuantizedLinear(float8, scales[:, :1], None, 8, inputs_per_scale=shape[1])
