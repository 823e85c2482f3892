"""Experts of a mixture whose weights keep the bits that they have in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from replicas.model.checkpoint.expert_weights import ExpertWeights
from replicas.model.checkpoint.formats import QuantizedWeight
from replicas.model.checkpoint.quantized_linear import QuantizedLinear, concatenate
from replicas.model.layers.experts import FusedExperts, PanelExpertLinear
from replicas.model.layers.panels import PanelProducts, Panels, pack_panels


def kept_experts(
    original: nn.Module,
    weights: ExpertWeights,
    read: Callable[[QuantizedWeight], QuantizedLinear],
    products: PanelProducts,
) -> FusedExperts:
    """Return experts with the activation and the biases of `original`, and with `weights` in panels on their device."""
    num_experts = original.num_experts
    assert isinstance(num_experts, int)
    kept = {name: _stacked(parts, num_experts, read, products) for name, parts in weights.layers.items()}
    return FusedExperts(original, PanelExpertLinear(products), kept)


def _stacked(
    experts: Sequence[Sequence[QuantizedWeight]],
    num_experts: int,
    read: Callable[[QuantizedWeight], QuantizedLinear],
    products: PanelProducts,
) -> Panels:
    """Return the layer of all experts; each is packed by itself, so that little memory is taken beside the result."""
    if len(experts) == num_experts:
        weights = (concatenate([read(part) for part in parts]) for parts in experts)
    else:
        [[whole]] = experts
        weight = read(whole)
        size = len(weight.numbers) // num_experts
        weights = (weight.rows(first, first + size) for first in range(0, num_experts * size, size))
    return Panels.stack([pack_panels(weight.to(products.device)) for weight in weights])
