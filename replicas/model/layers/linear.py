"""Linear layers: plain, and on CPU packed for oneDNN or in the compiled C++ kernels, in full precision or 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.errors import ModelLoadError
from replicas.model.hardware.selfcheck import find_fault, relative_error

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]
"""Factory of a linear layer from a weight [out_features, in_features] and a bias [out_features] or None.

The layer may keep a copy of the weight in another form. A weight that is also used elsewhere, for example an embedding
tied to the output layer, is then held twice.
"""

_log = logging.getLogger(__name__)
# Input rows for which oneDNN chooses the packing: those of a decode step. Prefills of 512 rows were not slower with it.
_EXPECTED_ROWS = 32
# Outputs in one panel of a packed weight, and inputs per output that are adjacent: they fill 4 bytes (int8: 2 bytes).
_PANEL = 32
_PAIRS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}
_INPUTS_UNIT = 32
_LARGEST_INT8 = 127
_ROWS_AT_ONCE = 4096


def choose_linears(dtype: torch.dtype, has_kernels: bool, quantization: str) -> LinearFactory:
    """Return the factory of the fastest linear layers for weights of `dtype` on this machine.

    Raises:
        ModelLoadError: there is no such quantization, or it needs the compiled kernels and they are not loaded.
    """
    if quantization not in ("none", "int8"):
        raise ModelLoadError(f"quantization is {quantization!r}; it must be none or int8")
    packed = PackedLinear if can_pack(dtype) else plain_linear
    if not has_kernels:
        if quantization != "none":
            raise ModelLoadError(f"quantization is {quantization!r}, which needs the compiled CPU kernels")
        return packed
    compiled = Int8Linear if quantization == "int8" else CppLinear
    return lambda weight, bias: (compiled if can_multiply(weight) else packed)(weight, bias)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return an `nn.Linear` that shares the given tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def join_linears(parts: Sequence[nn.Linear], make: LinearFactory) -> nn.Module:
    """Return one layer that computes all of `parts` and concatenates their outputs."""
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all parts have a bias or none has"
    return make(torch.cat(weights), torch.cat(biases) if biases else None)


def replace_linears(model: nn.Module, make: LinearFactory) -> None:
    """Replace all linear layers of `model`, one after the other."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))


class PackedLinear(nn.Module):
    """Replacement of `nn.Linear` with a packed copy of the weight. The caller must drop the original to free memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)
        self.bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], unpacked at each access, for model code that reads its dtype."""
        return self._packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, self._packed, self.bias, "none", [], "")
        return output


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if packed weights of `dtype` work on this machine and give the results of plain ones.

    The check is needed because the operations are private to torch, and oneDNN supports bfloat16 on some processors
    only.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    fault = find_fault(_packing_errors(dtype), dtype)
    if fault is not None:
        _log.warning("linear layers keep plain weights, because packed weights do not work here: %s", fault)
    return fault is None


def _packing_errors(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 40), (24,)))
    packed = PackedLinear(weight, bias)
    for num_rows in (0, 1, 3, 40):
        inputs = torch.randn(1, num_rows, 40, generator=generator).to(dtype)
        yield "a packed linear layer", relative_error(packed(inputs), functional.linear(inputs, weight, bias))


class CompiledLinear(nn.Module):
    """Linear layer in a compiled kernel, with a packed copy of `numbers` [out_features, in_features]."""

    def __init__(self, numbers: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = numbers.shape
        self.packed = nn.Parameter(pack(numbers), requires_grad=False)
        self.scales = _fixed(scales)
        self.bias = _fixed(bias)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the packed numbers, the scales (one per output, or None) and the bias or None."""
        return self.packed, self.scales, self.bias


class CppLinear(CompiledLinear):
    """Replacement of `nn.Linear`. The caller must drop the original weight to free its memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.detach(), None, bias)

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], unpacked at each access, for model code that reads its dtype."""
        return unpack(self.packed, self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_weight.default(
            inputs.contiguous(), self.packed, self.out_features, self.bias
        )
        return output


class Int8Linear(CompiledLinear):
    """Quantized replacement of `nn.Linear`: each row of the weight is 8-bit numbers times one scale.

    Inputs are quantized to 14 bits with one scale per row, so a row's outputs do not depend on the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        largest = weight.detach().abs().amax(dim=1).float()
        scales = (largest / _LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        # Quantize in pieces: a large vocabulary's weight in float32 would take as much memory as the rest of the model.
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            numbers[rows] = (weight[rows].detach().float() / scales[rows, None]).round().to(torch.int8)
        super().__init__(numbers, scales, bias)

    @property
    def numbers(self) -> Tensor:
        """Quantized weight [out_features, in_features] int8, unpacked at each access."""
        return unpack(self.packed, self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_int8.default(
            inputs.contiguous(), self.packed, self.scales, self.bias
        )
        return output


def can_multiply(weight: Tensor) -> bool:
    """Return True if the kernels support a weight of this shape."""
    return weight.shape[1] % _INPUTS_UNIT == 0


def pack(weight: Tensor) -> Tensor:
    """Return a weight [outputs, inputs] in the kernels' order, [panels, inputs / pair, outputs of a panel, pair].

    The last panel is padded with zeros.
    """
    pair = _PAIRS[weight.dtype]
    num_outputs, num_inputs = weight.shape
    filled = functional.pad(weight, (0, 0, 0, -num_outputs % _PANEL))
    return filled.view(-1, _PANEL, num_inputs // pair, pair).transpose(1, 2).contiguous()


def unpack(packed: Tensor, num_outputs: int) -> Tensor:
    """Return the original weight [num_outputs, inputs] of `packed`."""
    return packed.transpose(1, 2).flatten(0, 1).flatten(1)[:num_outputs]


def _fixed(values: Tensor | None) -> nn.Parameter | None:
    return None if values is None else nn.Parameter(values.detach(), requires_grad=False)
