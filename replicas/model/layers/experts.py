"""Experts of a mixture whose computation never waits for the device, so that steps with them can be captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from replicas.model.hardware.selfcheck import Agree, agreed_fault, alone, find_fault, relative_error
from replicas.model.layers.panels import PanelProducts, Panels

_NUM_TRIAL_TOKENS = 5


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Linear layer of each expert, in contiguous tensors, or in panels, which are never transposed."""

    weights: Tensor | Panels  # [num_experts, out_size, in_size]; [num_experts, in_size, out_size] if transposed
    biases: Tensor | None  # [num_experts, out_size]
    is_transposed: bool

    @property
    def in_size(self) -> int:
        """Size of an input row."""
        if isinstance(self.weights, Panels):
            return self.weights.num_inputs
        return self.weights.shape[1 if self.is_transposed else 2]

    @property
    def out_size(self) -> int:
        """Size of an output row."""
        if isinstance(self.weights, Panels):
            return self.weights.num_outputs
        return self.weights.shape[2 if self.is_transposed else 1]


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of a token and one of its experts, sorted by expert. Pair p belongs to token p // top_k."""

    order: Tensor  # [num_pairs] int64: the pairs, sorted by expert
    starts: Tensor  # [num_experts + 1] int64: first pair of each expert in `order`, and the number of pairs
    top_k: int

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> Routing:
        """Return the routing of experts [num_tokens, top_k], any integer type."""
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        numbers = torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
        return cls(order, torch.searchsorted(experts, numbers), top_k_index.shape[1])


class ExpertLinear(Protocol):
    """Product of each pair's row with the matrix of the pair's expert, plus its bias."""

    def __call__(self, inputs: Tensor, layer: ExpertLayer, routing: Routing, *, is_first: bool) -> Tensor:
        """Return the products, [num_pairs, out_size].

        If `is_first`, `inputs` [num_tokens, in_size] has the tokens' rows and the result is in the order of `routing`.
        Else `inputs` [num_pairs, in_size] is in that order and the result is in the order of the pairs.
        """


class FusedExperts(nn.Module):
    """Experts of one layer, with the weights and the activation of transformers' module.

    Each token's results are summed in the order of its experts, whatever the other tokens are.
    """

    def __init__(self, original: Any, linear: ExpertLinear, kept: Mapping[str, Panels] | None = None) -> None:
        """`kept` has weights in panels, by name, in place of the module's own, which loses them."""
        super().__init__()
        self.original = original
        self._linear = linear
        self.kept = kept or {}
        for name, panels in self.kept.items():
            delattr(original, name)
            for part, parameter in panels.parameters():
                self.register_parameter(f"{name}_{part}", parameter)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [num_tokens, size] of the outputs of each token's experts.

        Args:
            hidden_states: [num_tokens, size].
            top_k_index: [num_tokens, top_k], experts of each token.
            top_k_weights: [num_tokens, top_k], any float type.
        """
        original = self.original
        num_tokens, size = hidden_states.shape
        first, second = self.layer("gate_up_proj" if original.has_gate else "up_proj"), self.layer("down_proj")
        routing = Routing.of(top_k_index, original.num_experts)
        inner = self._linear(hidden_states.contiguous(), first, routing, is_first=True)
        inner = original._apply_gate(inner) if original.has_gate else original.act_fn(inner)
        output = self._linear(inner.contiguous(), second, routing, is_first=False)
        if getattr(original, "has_post_expert_norm", False):  # Older transformers have no such attribute.
            output = original.post_expert_norm(output)
        weighted = output.view(num_tokens, routing.top_k, size) * top_k_weights[..., None]
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def layer(self, name: str) -> ExpertLayer:
        """Return the linear layer of the experts' weights with this name."""
        biases = getattr(self.original, f"{name}_bias") if self.original.has_bias else None
        weights = self.kept[name] if name in self.kept else getattr(self.original, name)
        return ExpertLayer(weights, biases, self.original.is_transposed)


@dataclass(frozen=True, slots=True)
class PanelExpertLinear:
    """`ExpertLinear` of weights in panels."""

    products: PanelProducts

    def __call__(self, inputs: Tensor, layer: ExpertLayer, routing: Routing, *, is_first: bool) -> Tensor:
        """Return the products, [num_pairs, out_size]."""
        assert isinstance(layer.weights, Panels)
        order, starts, top_k = routing.order, routing.starts, routing.top_k
        return self.products.multiply_experts(
            inputs, layer.weights, layer.biases, order, starts, top_k, is_first=is_first
        )


def replace_experts(model: nn.Module, linear: ExpertLinear, agree: Agree = alone) -> str | None:
    """Replace all experts of `model` by `FusedExperts`; return a description of the first fault of a check, or None.

    After a fault the model, and that of each rank that must `agree`, has its own experts.
    """
    replacements: list[tuple[nn.Module, str, Any, FusedExperts]] = [
        (parent, name, child, FusedExperts(child, linear))
        for parent in model.modules()
        for name, child in parent.named_children()
        if are_experts(child)
    ]
    faults = (find_fault(_errors(original, fused), original.down_proj.dtype) for *_, original, fused in replacements)
    fault = agreed_fault(next((fault for fault in faults if fault is not None), None), agree)
    if fault is not None:
        return fault
    for parent, name, _, fused in replacements:
        setattr(parent, name, fused)
    return None


def are_experts(module: nn.Module) -> bool:
    """Return True if a module has the weights of all experts of a layer, as transformers' experts have."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "down_proj"))


@torch.inference_mode()
def _errors(original: Any, fused: FusedExperts) -> Iterator[tuple[str, float]]:
    """Yield the error on a few random tokens, some of which share an expert."""
    generator = torch.Generator().manual_seed(0)
    device, dtype = original.down_proj.device, original.down_proj.dtype
    size = fused.layer("down_proj").out_size
    hidden = torch.randn(_NUM_TRIAL_TOKENS, size, generator=generator).to(device, dtype)
    scores = torch.rand(_NUM_TRIAL_TOKENS, original.num_experts, generator=generator)
    weights, index = (tensor.to(device) for tensor in scores.topk(min(3, original.num_experts)))
    output, expected = (experts(hidden, index, weights.to(dtype)) for experts in (fused, original))
    yield "the experts", relative_error(output, expected)
