"""Which linear layers a model gets on CPU, and putting them in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from replicas.errors import ModelLoadError
from replicas.model.cpp_linears import CppLinear, Int8Linear, can_multiply
from replicas.model.packed_linear import PackedLinear, can_pack

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]
"""Makes what multiplies by a weight [out_features, in_features] and adds a bias [out_features].

What is made may keep a copy in another form: a weight that something else needs too, as a head that is tied to the
embedding, is then held twice.
"""


def choose_linears(dtype: torch.dtype, has_kernels: bool, quantization: str) -> LinearFactory:
    """The fastest linear layers for weights of `dtype` here.

    Raises:
        ModelLoadError: there is no such quantization, or no kernels for it.
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
    """An `nn.Linear` over the given tensors themselves."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def join_linears(parts: Sequence[nn.Linear], make: LinearFactory) -> nn.Module:
    """One layer that computes all of `parts`, outputs side by side."""
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all parts have a bias or none has"
    return make(torch.cat(weights), torch.cat(biases) if biases else None)


def replace_linears(model: nn.Module, make: LinearFactory) -> None:
    """Put faster layers in the place of all linear layers of `model`, one after the other."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))
