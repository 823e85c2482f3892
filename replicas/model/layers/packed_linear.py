"""Linear layers with weights packed for oneDNN, on CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.model.hardware.selfcheck import find_fault, relative_error

_log = logging.getLogger(__name__)
# Input rows for which oneDNN chooses the packing: those of a decode step. Prefills of 512 rows were not slower with it.
_EXPECTED_ROWS = 32


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
    fault = find_fault(_errors(dtype), dtype)
    if fault is not None:
        _log.warning("linear layers keep plain weights, because packed weights do not work here: %s", fault)
    return fault is None


def _errors(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 40), (24,)))
    packed = PackedLinear(weight, bias)
    for num_rows in (0, 1, 3, 40):
        inputs = torch.randn(1, num_rows, 40, generator=generator).to(dtype)
        yield "a packed linear layer", relative_error(packed(inputs), functional.linear(inputs, weight, bias))
