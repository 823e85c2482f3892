"""transformers' own decoder layers through torch.compile, for models whose layers have no fused form of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.attention import AttentionPort, number_layers
from replicas.model.probe import dry_forward
from replicas.model.selfcheck import WHOLE_MODEL, find_fault, relative_error

_log = logging.getLogger(__name__)

# Kinds of layers, each for one token and for many: beyond so many the compiler would silently leave layers as they are.
_MAX_COMPILATIONS = 64
_TRIALS = ([3, 4, 5, 6, 7], [3])


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
    fault = find_fault(_errors(model, port, expected), model.dtype, WHOLE_MODEL)
    if fault is not None:
        _undo(layers)
        _log.warning("layers run as transformers has them: they cannot be compiled here: %s", fault)
        return False
    return bool(layers)


def _errors(model: PreTrainedModel, port: AttentionPort, expected: list[Tensor]) -> Iterator[tuple[str, float]]:
    """Errors of the model's logits. Compiles the layers."""
    for token_ids, logits in zip(_TRIALS, expected, strict=True):
        yield "the model with compiled layers", relative_error(dry_forward(model, port, token_ids)[1], logits)


def _undo(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer._compiled_call_impl = None
