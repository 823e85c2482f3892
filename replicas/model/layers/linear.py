"""Selection of a model's linear layers on CPU, and their replacement in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from replicas.errors import ModelLoadError
from replicas.model.layers.cpp_linear import CppLinear, Int8Linear, can_multiply
from replicas.model.layers.packed_linear import PackedLinear, can_pack

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]
"""Factory of a linear layer from a weight [out_features, in_features] and a bias [out_features] or None.

The layer may keep a copy of the weight in another form. A weight that is also used elsewhere, for example an embedding
tied to the output layer, is then held twice.
"""


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
