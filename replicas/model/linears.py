"""Which linear layers a model gets on CPU, and putting them in the place of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from replicas.model.cpp_linears import CppLinear, Int8Linear, can_multiply
from replicas.model.errors import ModelLoadError
from replicas.model.packed_linear import PackedLinear, can_pack

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]
"""Makes what multiplies by a weight [out_features, in_features] and adds a bias [out_features]."""


@dataclass(frozen=True, slots=True)
class Linears:
    """How the linear layers of one model are made."""

    make: LinearFactory
    """From a weight that nothing else needs: what is made may keep a copy in another form."""
    make_tied: LinearFactory
    """From a weight that stays where it is, as that of a head tied to the embedding: a whole copy would be waste."""


def choose_linears(dtype: torch.dtype, has_kernels: bool, quantization: str) -> Linears:
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
        return Linears(packed, plain_linear)
    if quantization == "int8":
        return Linears(_where_possible(Int8Linear, packed), _where_possible(Int8Linear, plain_linear))
    # Elsewhere the packed ones are as fast for few rows, and faster for many.
    return Linears(packed, _where_possible(CppLinear, plain_linear))


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


def replace_linears(model: nn.Module, linears: Linears) -> None:
    """Put faster layers in the place of all linear layers of `model`, one after the other."""
    modules = list(model.modules())
    num_holders = Counter(id(weight) for module in modules for weight in module.parameters(recurse=False))
    for parent in modules:
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear:
                is_tied = num_holders[id(child.weight)] > 1
                setattr(parent, name, (linears.make_tied if is_tied else linears.make)(child.weight, child.bias))


def _where_possible(make: LinearFactory, otherwise: LinearFactory) -> LinearFactory:
    """`make` for weights of a shape that the kernels take, `otherwise` for the rest."""
    return lambda weight, bias: (make if can_multiply(weight) else otherwise)(weight, bias)
