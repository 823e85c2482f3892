"""Compilation of transformers' decoder layers by torch.compile, for models without fused layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.attention.interface import AttentionPort, number_layers
from replicas.model.attention.probe import dry_forward
from replicas.model.hardware.selfcheck import WHOLE_MODEL, find_fault, relative_error

_log = logging.getLogger(__name__)

# Compilations per function: each kind of layer, for one token and for many. Beyond it torch silently runs uncompiled.
_MAX_COMPILATIONS = 64
_TRIALS = ([3, 4, 5, 6, 7], [3])


def compile_layers(model: PreTrainedModel, port: AttentionPort, backend: str = "inductor") -> bool:
    """Compile the decoder layers of `model`, once for each kind of layer. Return True if layers are now compiled.

    If compilation or the check fails, the layers run uncompiled as before. Attention stays an opaque operation (see
    `attention/interface.py`), so its implementation may differ between steps.
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
        _log.warning("layers run uncompiled, because their compilation does not work here: %s", fault)
        return False
    return bool(layers)


def _errors(model: PreTrainedModel, port: AttentionPort, expected: list[Tensor]) -> Iterator[tuple[str, float]]:
    """Yield the errors of the model's logits. The first run compiles the layers."""
    for token_ids, logits in zip(_TRIALS, expected, strict=True):
        yield "the model with compiled layers", relative_error(dry_forward(model, port, token_ids)[1], logits)


def _undo(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer._compiled_call_impl = None
