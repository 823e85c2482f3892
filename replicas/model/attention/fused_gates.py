"""Gated delta net with its gates in the kernel of the rule: eight operations less for a layer than in transformers."""

from __future__ import annotations

import logging
from array import array
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from replicas.engine.batch import StateMove
from replicas.model.attention.recurrent import ConvCall, DeltaGates, RecurrentPort, RuleCall, names_in_forward
from replicas.model.attention.state_cache import StateCache
from replicas.model.attention.state_torch import TorchStates
from replicas.model.batch.inputs import BatchInputs, Chunk
from replicas.model.hardware.selfcheck import find_fault, relative_error

_log = logging.getLogger(__name__)

_NAMES = frozenset(
    {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm", "out_proj", "softplus"}
)
"""Names in the `forward` of a mixer of this form: Qwen3.5's."""
_CHECKED_TOKENS = 20


def fuse_gates(recurrent: RecurrentPort) -> int:
    """Replace `forward` of the mixers that are gated delta nets; return their number.

    A mixer whose numbers are others than before keeps its own, with a warning.
    """
    mixers = [mixer for mixer in recurrent.mixers if names_in_forward(mixer) >= _NAMES]
    if not mixers:
        return 0
    errors = (("a gated delta net", _error(mixer, recurrent)) for mixer in mixers[:1])
    fault = find_fault(errors, next(mixers[0].parameters()).dtype)
    if fault is not None:
        _log.warning("the gates of recurrent layers are computed apart: %s", fault)
        return 0
    for mixer in mixers:
        mixer.forward = _bound_forward(mixer, recurrent)
    return len(mixers)


def _bound_forward(mixer: Any, recurrent: RecurrentPort) -> MethodType:
    def forward(mixer: Any, hidden_states: Tensor, **_: object) -> Tensor:
        return mix(mixer, recurrent, hidden_states)

    return MethodType(forward, mixer)


def mix(mixer: Any, recurrent: RecurrentPort, hidden_states: Tensor) -> Tensor:
    """Return the mixer's output [1, num_tokens, hidden_size]."""
    num_tokens, layer, states = hidden_states.shape[1], int(mixer.layer_idx), recurrent.context
    assert states is not None, "a recurrent layer was called outside `using`"
    weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    mixed = states.convolve(ConvCall(layer, mixer.in_proj_qkv(hidden_states)[0], weight, bias, has_silu=True))
    query, key, value = torch.split(mixed, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    call = RuleCall(
        layer,
        query.view(num_tokens, -1, mixer.head_k_dim),
        key.view(num_tokens, -1, mixer.head_k_dim),
        value.view(num_tokens, -1, mixer.head_v_dim),
        decay=mixer.in_proj_a(hidden_states)[0, :num_tokens],
        beta=mixer.in_proj_b(hidden_states)[0, :num_tokens],
        scale=mixer.head_k_dim**-0.5,
        has_norm=True,
        gates=DeltaGates(mixer.A_log, mixer.dt_bias),
    )
    output = states.advance(call).to(hidden_states.dtype).reshape(-1, mixer.head_v_dim)
    gated = mixer.norm(output, mixer.in_proj_z(hidden_states).reshape(-1, mixer.head_v_dim))
    projected: Tensor = mixer.out_proj(gated.reshape(1, num_tokens, -1))
    return projected


@torch.inference_mode()
def _error(mixer: nn.Module, recurrent: RecurrentPort) -> float:
    """Return the error of the mixer's output for random inputs, from its own, over states in plain torch."""
    weight = next(mixer.parameters())
    generator = torch.Generator().manual_seed(0)
    size = int(mixer.out_proj.out_features)  # type: ignore[union-attr, arg-type]
    inputs = torch.randn(1, _CHECKED_TOKENS, size, generator=generator).to(weight)
    layers = [layer for layer in recurrent.layers if layer.index == mixer.layer_idx]
    cache = StateCache(layers, 1, 16, weight.dtype, weight.device)
    rows = torch.arange(_CHECKED_TOKENS, device=weight.device)
    chunk = Chunk(0, 0, _CHECKED_TOKENS, array("i"), StateMove(0, 1))
    outputs = []
    for forward in (mixer.forward, _bound_forward(mixer, recurrent)):
        recurrent.context = TorchStates(cache, BatchInputs(rows[None], rows[None], rows, None, rows, (chunk,)))
        try:
            outputs.append(forward(inputs))
        finally:
            recurrent.context = None
    return relative_error(outputs[1], outputs[0])
