"""Experts of a mixture whose weights have 4 or 8 bits: those of a checkpoint, or rounded from dense ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor, nn

from replicas.model.checkpoint.expert_weights import DOWN, GATE_UP, UP, ExpertWeights
from replicas.model.checkpoint.formats import QuantizedWeight
from replicas.model.checkpoint.quantized_linear import QuantizedLinear, concatenate
from replicas.model.layers.experts import FusedExperts, PanelExpertLinear, are_experts
from replicas.model.layers.panels import PanelProducts, Panels, pack_panels

_INPUTS_UNIT = 32


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


def round_experts(
    model: nn.Module, quantize: Callable[[Tensor], QuantizedLinear], products: PanelProducts | None
) -> None:
    """Round the dense weights of all experts of `model`; `quantize` rounds that of one expert.

    Without `products` the rounded weights stay dense. Weights whose inputs are no multiple of 32 stay as they are.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not are_experts(child):
                continue
            weights = {each: _matrices(child, each) for each in (GATE_UP if child.has_gate else UP, DOWN)}
            if any(matrices.shape[2] % _INPUTS_UNIT for matrices in weights.values()):
                continue
            if products is not None:
                kept = {each: _rounded(matrices, quantize) for each, matrices in weights.items()}
                setattr(parent, name, FusedExperts(child, PanelExpertLinear(products), kept))
                continue
            for matrix in chain.from_iterable(weights.values()):
                matrix.copy_(quantize(matrix).dense(matrix.dtype))


def _matrices(experts: nn.Module, name: str) -> Tensor:
    """Return a layer's weights as [num_experts, num_outputs, num_inputs], a view."""
    weights = experts.get_parameter(name).detach()
    return weights.transpose(1, 2) if experts.is_transposed else weights


def _rounded(matrices: Tensor, quantize: Callable[[Tensor], QuantizedLinear]) -> Panels:
    return Panels.stack([pack_panels(quantize(matrix)) for matrix in matrices])
