"""Mixers of the gated delta rule with one linear layer for all their inputs, and one kernel call for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from replicas.model.attention.recurrent import MixerFunctions, RecurrentPort, by_rows
from replicas.model.attention.state_cache import StateLayer
from replicas.model.attention.state_cpp import CppStates, DeltaParts, can_advance
from replicas.model.attention.state_select import StateSpec, check_steps
from replicas.model.attention.state_torch import TorchStates
from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.linear import GroupedLinear, LinearFactory, join_linears, plain_linear

_BLOCK_SIZE = 16
"""Block size of a check, tokens."""
_INPUTS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of a mixer's input layers, in each class. Their outputs together are queries, keys, values, gates, b and a."""


class GatedDeltaNet(nn.Module):
    """Replacement of a mixer. It computes in the compiled kernels if the states are `CppStates`, else in torch."""

    def __init__(self, original: Any, port: RecurrentPort, shape: StateLayer, make: LinearFactory) -> None:
        super().__init__()
        norm = _first(original, "norm", "o_norm")
        self._port = port
        self.shape = shape
        self._functions = MixerFunctions(port, shape.index)
        self.parts = DeltaParts(
            conv_weight=original.conv1d.weight.detach().squeeze(1).contiguous(),
            rates=-original.A_log.detach().float().exp(),
            biases=original.dt_bias.detach().float(),
            beta_scale=2.0 if getattr(original, "allow_neg_eigval", False) else 1.0,
            norm=norm.weight.detach().clone(),
            epsilon=float(norm.variance_epsilon),
        )
        self.inputs = _joined(original, make)
        self.output = join_linears((_first(original, "out_proj", "o_proj"),), make)

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """Mix hidden states [1, num_tokens, hidden_size]; the result has the same shape."""
        rows, context = self.inputs(hidden_states[0]), self._port.context
        if isinstance(context, CppStates):
            mixed = context.mix(self.shape.index, rows, self.parts)
        else:
            mixed = self._mix_in_torch(rows)
        output: Tensor = self.output(mixed)
        return output[None]

    def _mix_in_torch(self, rows: Tensor) -> Tensor:
        shape, parts = self.shape, self.parts
        values = shape.num_heads * shape.value_size
        sizes = (shape.num_channels, values, shape.num_heads, shape.num_heads)
        channels, gate, b, a = rows.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        mixed = self._functions.convolve(channels.transpose(0, 1)[None], parts.conv_weight, activation="silu")
        keys = shape.num_key_heads * shape.key_size
        query, key, value = mixed.transpose(1, 2).split((keys, keys, values), dim=2)  # type: ignore[no-untyped-call]
        outputs, _ = self._functions.apply_delta_rule(
            query.unflatten(2, (-1, shape.key_size)),
            key.unflatten(2, (-1, shape.key_size)),
            value.unflatten(2, (-1, shape.value_size)),
            g=(parts.rates * by_rows(functional.softplus, a.float() + parts.biases))[None],
            beta=parts.beta_scale * by_rows(torch.sigmoid, b)[None],
            use_qk_l2norm_in_kernel=True,
        )
        normed = functional.rms_norm(outputs[0].float(), parts.norm.shape, parts.norm.float(), parts.epsilon)
        return (normed.flatten(1) * functional.silu(gate.float())).to(rows.dtype)


def replace_delta_nets(model: PreTrainedModel, port: RecurrentPort, make: LinearFactory) -> str | None:
    """Replace the mixers of the gated delta rule, if a check shows that the replacement computes the same.

    Returns a description of the fault if there is one. Mixers of which some input layers keep 4 or 8 bits, and others
    do not, stay as they are.
    """
    shapes = {layer.index: layer for layer in port.layers}
    # Originals are not listed, so that the weights of each are freed when it is replaced.
    names = {id(child): (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    indices: dict[int, Any] = {id(mixer): mixer.layer_idx for mixer in port.mixers if _input_layers(mixer)}
    places = [(*names[number], shapes[index]) for number, index in indices.items()]
    for number, (parent, name, shape) in enumerate(places):
        original = getattr(parent, name)
        if not can_advance([shape]) or not _can_join(original):
            return None
        if number == 0:
            # `make` may quantize, which the check must not see.
            fault = find_fault(_errors(original, GatedDeltaNet(original, port, shape, plain_linear), port), model.dtype)
            if fault is not None:
                return fault
        setattr(parent, name, GatedDeltaNet(original, port, shape, make))
        port.mixers.remove(original)
        del original.forward  # The port's function refers to the mixer, which would keep the weights.
    return None


def _first(module: nn.Module, *names: str) -> Any:
    """Return the attribute of the first of `names` that the module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _input_layers(mixer: nn.Module) -> list[Any]:
    """Return the mixer's input layers; empty if its class is not known."""
    layouts = (names for names in _INPUTS if all(hasattr(mixer, name) for name in names))
    return [getattr(mixer, name) for name in next(layouts, ())]


def _can_join(mixer: Any) -> bool:
    """Return True if the mixer is one of the gated delta rule, and its input layers are all dense or all quantized."""
    linears = _input_layers(mixer)
    is_quantized = {isinstance(linear, GroupedLinear) for linear in linears}
    is_known = getattr(mixer, "activation", None) == "silu" and mixer.conv1d.bias is None
    return is_known and (is_quantized == {False} or (is_quantized == {True} and not _has_groups(mixer)))


def _has_groups(mixer: nn.Module) -> bool:
    """Return True if each key head has its queries, keys, values and gates next to one another in the input layers."""
    return hasattr(mixer, "in_proj_qkvz")


def _joined(mixer: Any, make: LinearFactory) -> nn.Module:
    """Return one layer for all inputs of the mixer, in the order of `_INPUTS`."""
    linears = _input_layers(mixer)
    if not _has_groups(mixer):
        return join_linears(linears, make)
    first, second = (torch.arange(linear.out_features)[None, None] for linear in linears)
    query, key, value, gate, b, a = (part.flatten() for part in mixer.fix_query_key_value_ordering(first, second))
    weights = [linear.weight.detach() for linear in linears]
    return make(torch.cat([weights[0][torch.cat([query, key, value, gate])], weights[1][torch.cat([b, a])]]), None)


@torch.inference_mode()
def _errors(original: nn.Module, fast: GatedDeltaNet, port: RecurrentPort) -> Iterator[tuple[str, float]]:
    """Yield the errors of the replacement in the kernels, beside the original in torch."""
    linear = _input_layers(original)[0]
    dtype = linear.weight.dtype
    caches, steps = check_steps(StateSpec([fast.shape], _BLOCK_SIZE, dtype, linear.weight.device))
    generator = torch.Generator().manual_seed(0)
    try:
        for inputs in steps:
            hidden = torch.randn(inputs.input_ids.shape[1], linear.in_features, generator=generator).to(dtype)
            outputs = []
            for module, states in ((fast, CppStates(caches[0], inputs)), (original, TorchStates(caches[1], inputs))):
                port.context = states
                outputs.append(module(hidden[None]))
            yield "a mixer of the gated delta rule", relative_error(*outputs)
    finally:
        port.context = None
