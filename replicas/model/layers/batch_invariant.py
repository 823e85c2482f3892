"""Batch-invariant operations: the numbers of a row are summed in one order, whatever the number of rows is.

A GPU's libraries choose a kernel by the number of rows, and kernels differ in the order of their sums. So the bits of a
row depend on the other rows of the batch. He et al., Defeating Nondeterminism in LLM Inference, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from replicas.errors import UnsupportedModel
from replicas.model.hardware.device import compute_capability
from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.experts import ExpertLayer, Routing
from replicas.model.layers.invariant_tiles import divide
from replicas.model.layers.triton_experts import batch_invariant_expert_linear
from replicas.model.layers.triton_kernels import add_parts_kernel, linear_kernel, row_sum_kernel

_ROW_TILE = 1024
_PASSED = (torch.float64,)
"""Float types whose sums stay torch's: no model computes in them."""
_aten = torch.ops.aten
REFUSED = frozenset(
    (
        "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm", "_scaled_mm", "convolution", "cumsum",
        "logcumsumexp", "prod", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "index_add",
        "index_add_", "scatter_add", "scatter_add_", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math", "scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_",
        "_cdist_forward",
    )
)  # fmt: skip
"""Operations whose sums may have an order that depends on the batch, and for which there is no kernel here.

Softmax and layer normalisation are not among them: torch's kernels compute a row in one block or warp, which they
choose by the size of the row.
"""


class DependsOnBatch(Exception):
    """Operation that would make a row depend on the rest of its batch."""


def multiply_rows(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [num_rows, in_size] times weight [in_size, out_size], any strides, plus bias [out_size]."""
    num_rows, in_size = inputs.shape
    out_size = weight.shape[1]
    is_transposed = weight.t().is_contiguous()
    inputs = inputs.contiguous()
    weight = weight if is_transposed else weight.contiguous()
    output = inputs.new_empty(num_rows, out_size)
    if num_rows == 0:
        return output
    division = divide(compute_capability(inputs.device), in_size, out_size, inputs.itemsize, num_rows)
    tile, has_bias = division.tile, bias is not None
    bias = output if bias is None else bias.contiguous()
    parts = output
    if division.is_split:
        parts = inputs.new_empty(division.num_parts, num_rows, out_size, dtype=torch.float32)
    # Programs of the same weights run together.
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(out_size, tile.columns))
    linear_kernel[(*grid, division.num_parts if division.is_split else 1)](
        inputs,
        weight,
        bias,
        parts,
        num_rows,
        IN_SIZE=in_size,
        OUT_SIZE=out_size,
        NUM_PARTS=division.num_parts,
        PART_SIZE=division.part_size,
        IS_TRANSPOSED=is_transposed,
        HAS_BIAS=has_bias,
        IS_SPLIT=division.is_split,
        TILE_ROWS=tile.rows,
        TILE_COLUMNS=tile.columns,
        TILE_INNER=tile.inner,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if division.is_split:
        add_parts_kernel[(num_rows, triton.cdiv(out_size, _ROW_TILE))](
            parts, bias, output, num_rows, OUT_SIZE=out_size, NUM_PARTS=division.num_parts, HAS_BIAS=has_bias,
            TILE=_ROW_TILE,
        )  # fmt: skip
    return output


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sums [num_rows] float32 of rows [num_rows, size]."""
    rows = rows.contiguous()
    sums = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    if len(rows):
        row_sum_kernel[(len(rows),)](rows, sums, rows.shape[1], TILE=_ROW_TILE)
    return sums


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    return multiply_rows(rows, weight.t(), bias).view(*inputs.shape[:-1], weight.shape[0])


def _mm(inputs: Tensor, weight: Tensor) -> Tensor:
    return multiply_rows(inputs, weight, None)


def _addmm(bias: Tensor, inputs: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() != 1 or beta != 1 or alpha != 1:
        raise DependsOnBatch("addmm of a matrix or with factors")
    return multiply_rows(inputs, weight, bias)


def _bmm(inputs: Tensor, weights: Tensor) -> Tensor:
    if inputs.shape[-1] == 1:
        return inputs * weights  # There is nothing to add up. Rotary encodings compute their angles so.
    if not isinstance(weights, nn.Parameter):
        raise DependsOnBatch("bmm")
    num_heads, num_rows, in_size = inputs.shape
    numbers = torch.arange(num_heads * num_rows, device=inputs.device)
    starts = torch.arange(num_heads + 1, device=inputs.device) * num_rows
    layer = ExpertLayer(weights.contiguous(), None, is_transposed=True)
    rows = inputs.reshape(-1, in_size).contiguous()
    output = batch_invariant_expert_linear(rows, layer, Routing(numbers, starts, top_k=1), is_first=True)
    return output.view(num_heads, num_rows, -1)


def _sum(
    numbers: Tensor, dims: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    chosen = sorted({dim % numbers.dim() for dim in dims or range(numbers.dim())})
    other_dims = [dim for dim in range(numbers.dim()) if dim not in chosen]
    rows = numbers.permute(*other_dims, *chosen).reshape(*(numbers.shape[dim] for dim in other_dims), -1)
    sums = sum_rows(rows.reshape(-1, rows.shape[-1])).to(dtype or numbers.dtype)
    shape = [1 if dim in chosen else size for dim, size in enumerate(numbers.shape)]
    return sums.view(shape if keepdim else [numbers.shape[dim] for dim in other_dims])


def _mean(
    numbers: Tensor, dims: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    sums = _sum(numbers, dims, keepdim, dtype=torch.float32)
    return (sums / (numbers.numel() // max(1, sums.numel()))).to(dtype or numbers.dtype)


def _logsumexp(numbers: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    highest = numbers.amax(dims, keepdim=True)
    sums = _sum((numbers - highest).exp(), dims, keepdim=True).log() + highest
    return sums if keepdim else sums.squeeze(dims)


_OWN: dict[Any, Callable[..., Tensor]] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.logsumexp.default: _logsumexp,
}
_REPLACED = frozenset(op.overloadpacket.__name__ for op in _OWN)
"""Operations whose other overloads are refused."""
_PUTS = frozenset(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"))
"""Operations that add up numbers for the same cell if their fourth argument, `accumulate`, is true."""


class BatchInvariantOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which products and sums are those of this module. A kernel that is not torch's is not affected."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], Tensor) and _has_order(args[0]):
            own = _OWN.get(func)
            if own is not None:
                return own(*args, **kwargs)
            if func.namespace == "aten" and (name in REFUSED or name in _REPLACED or _adds_up(name, args, kwargs)):
                raise DependsOnBatch(name)
        with self:  # A composite operation is made of others.
            decomposed = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if decomposed is NotImplemented else decomposed


def _adds_up(name: str, args: Any, kwargs: Any) -> bool:
    return name in _PUTS and bool(kwargs.get("accumulate", args[3:4] == (True,)))


def _has_order(numbers: Tensor) -> bool:
    """Return True if a sum of these numbers depends on their order."""
    return numbers.is_floating_point() and numbers.dtype not in _PASSED


def check_products(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a description of the kernels' first fault; None if there is none, and rows do not depend on others."""
    return find_fault(_errors(dtype, device), dtype)


@torch.inference_mode()
def _errors(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((70, 200), (90, 200), (90,))
    )
    products = _linear(inputs, weight, bias)
    expected = functional.linear(inputs.float(), weight.float(), bias.float())
    yield "a product", relative_error(products.float(), expected)
    yield "a sum", relative_error(sum_rows(inputs)[None], inputs.float().sum(dim=1)[None])
    for row in (0, 33, 69):
        is_same = torch.equal(_linear(inputs[row : row + 1], weight, bias)[0], products[row])
        yield "a product alone and among others", 0.0 if is_same else float("inf")


def refuse_others(model_type: str, run: Callable[[], object]) -> None:
    """Run a forward pass, and raise an error if it has an operation that depends on the batch.

    Raises:
        UnsupportedModel: the name of the first such operation.
    """
    try:
        with BatchInvariantOps():  # type: ignore[no-untyped-call]
            run()
    except DependsOnBatch as error:
        raise UnsupportedModel(model_type, f"batch_invariant is true, and its code uses {error}") from error
