"""Experts of a mixture whose weights have 4 or 8 bits: those of a checkpoint, or rounded from dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from replicas.model.checkpoint.expert_weights import DOWN, GATE_UP, UP, ExpertWeights
from replicas.model.checkpoint.formats import QuantizedWeight
from replicas.model.checkpoint.quantized_linear import QuantizedLinear, concatenate
from replicas.model.layers.experts import FusedExperts, PanelExpertLinear, are_experts
from replicas.model.layers.panels import PanelProducts, Panels, pack_panels
from replicas.model.layers.rounding import Rounding

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
    model: nn.Module, rounds: Rounding, products: PanelProducts | None, largest: Mapping[str, Tensor]
) -> None:
    """Round the dense weights of all experts of `model`; `rounds` rounds that of one expert.

    Without `products` the rounded weights stay dense. Weights whose inputs are no multiple of 32 stay as they are.
    Where other ranks hold inputs of `DOWN`, too, `largest` has the largest magnitudes of its whole rows,
    [num_experts, num_outputs], by the name of the module of experts.
    """
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not are_experts(child):
                continue
            weights = {each: _matrices(child, each) for each in (GATE_UP if child.has_gate else UP, DOWN)}
            if any(matrices.shape[2] % _INPUTS_UNIT for matrices in weights.values()):
                continue
            of_rows = {DOWN: largest.get(f"{parent_name}.{name}")}
            rounded = {each: _rounded(matrices, rounds, of_rows.get(each)) for each, matrices in weights.items()}
            if products is not None:
                kept = {each: Panels.stack([*map(pack_panels, experts)]) for each, experts in rounded.items()}
                setattr(parent, name, FusedExperts(child, PanelExpertLinear(products), kept))
                continue
            for each, experts in rounded.items():
                dense = torch.stack([expert.dense(weights[each].dtype) for expert in experts])
                dense = dense.transpose(1, 2).contiguous() if child.is_transposed else dense
                setattr(child, each, nn.Parameter(dense, requires_grad=False))


def _rounded(matrices: Tensor, rounds: Rounding, largest: Tensor | None) -> Iterator[QuantizedLinear]:
    """Round the weight of each expert, one after the other."""
    for expert, matrix in enumerate(matrices):
        yield rounds(matrix, None if largest is None else largest[expert])


def _matrices(experts: nn.Module, name: str) -> Tensor:
    """Return a layer's weights as [num_experts, num_outputs, num_inputs], a view."""
    weights = experts.get_parameter(name).detach()
    return weights.transpose(1, 2) if experts.is_transposed else weights
