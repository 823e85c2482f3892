"""Normalisation in one operation, in the place of the model code's own modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from replicas.model.layer_math import LayerMath, Norm
from replicas.model.selfcheck import find_fault, relative_error


class FusedNorm(nn.Module):
    """Root mean square normalisation over the last dimension."""

    def __init__(self, original: Any, math: LayerMath) -> None:
        super().__init__()
        self.weight: nn.Parameter = original.weight
        self.variance_epsilon = float(original.variance_epsilon)
        self._norm = Norm(self.weight.detach(), self.variance_epsilon)
        self._math = math

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] to the same."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return self._math.add_and_normalize(rows, None, self._norm).view(hidden.shape)


def replace_norms(model: nn.Module, math: LayerMath) -> None:
    """Replace every norm of `model` that looks like a plain one and, tried out, computes the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and _has_plain_fields(child):
                fused = FusedNorm(child, math)
                if find_fault(_errors(child, fused), fused.weight.dtype) is None:
                    setattr(parent, name, fused)


def _has_plain_fields(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and hasattr(norm, "variance_epsilon")


@torch.inference_mode()
def _errors(norm: nn.Module, fused: FusedNorm) -> Iterator[tuple[str, float]]:
    """Errors on numbers that tell formulas apart."""
    generator = torch.Generator().manual_seed(0)
    weight = fused.weight
    hidden = (torch.randn(2, 3, len(weight), generator=generator) * 3 + 1).to(weight.device, weight.dtype)
    yield "a norm", relative_error(fused(hidden), norm(hidden))
