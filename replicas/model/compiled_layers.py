"""transformers' own decoder layers through torch.compile, for models whose layers have no fused form of ours."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.attention import AttentionPort, number_layers
from replicas.model.probe import dry_forward

_log = logging.getLogger(__name__)

# Kinds of layers, each for one token and for many: beyond so many the compiler would silently leave layers as they are.
_MAX_COMPILATIONS = 64
# Of a logit, relative to the largest; what is wrong differs by about 1.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def compile_layers(model: PreTrainedModel, port: AttentionPort, backend: str = "inductor") -> bool:
    """Compile the decoder layers of `model`, once for all of a kind; False, and nothing is changed, where that fails.

    Attention stays one opaque operation (see `attention`), so that what it does may differ from step to step.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_COMPILATIONS)
    expected = [dry_forward(model, port, token_ids)[1] for token_ids in _TRIALS]
    number_layers(model)
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    fault = _fault(model, port, expected)
    if fault is not None:
        _undo(layers)
        _log.warning("layers run as transformers has them: they cannot be compiled here: %s", fault)
        return False
    return bool(layers)


_TRIALS = ([3, 4, 5, 6, 7], [3])


def _fault(model: PreTrainedModel, port: AttentionPort, expected: list[Tensor]) -> str | None:
    """What is wrong with the compiled layers, in words; None: nothing. Compiles them."""
    # Whatever compilers and drivers may raise: the layers themselves need none of it.
    try:
        found = [dry_forward(model, port, token_ids)[1] for token_ids in _TRIALS]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    differences = [(one - other).abs().amax() / other.abs().amax() for one, other in zip(found, expected, strict=True)]
    difference = float(torch.stack(differences).amax())
    if not difference <= _TOLERANCES[model.dtype]:  # Also if it is no number.
        return f"logits differ by {difference:.1e} of the largest"
    return None


def _undo(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer._compiled_call_impl = None
