"""Optimization of a loaded model: replaces transformers' modules by faster ones that compute the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import AttentionLayer
from replicas.model.layers.cpp_decoder import CppDecoder
from replicas.model.layers.cpp_ops import CppLayerOps
from replicas.model.layers.fused_decoder import FusedDecoder, can_fuse
from replicas.model.layers.fused_norm import replace_norms
from replicas.model.layers.interface import LayerOps, TorchLayerOps
from replicas.model.layers.linear import LinearFactory, choose_linears, plain_linear, replace_linears

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FusedModules:
    """Replacements of a model's modules."""

    ops: LayerOps
    make_linear: LinearFactory
    decoder: type[FusedDecoder] = FusedDecoder
    """Decoder class for a model that can be fused."""


def cpu_modules(dtype: torch.dtype, has_kernels: bool, quantization: str) -> FusedModules:
    """Return the fastest replacements on CPU. `has_kernels` is True if the compiled kernels are loaded.

    Raises:
        ModelLoadError: there is no such quantization, or it needs the kernels and they are not loaded.
    """
    make_linear = choose_linears(dtype, has_kernels, quantization)
    return (
        FusedModules(CppLayerOps(), make_linear, CppDecoder)
        if has_kernels
        else FusedModules(TorchLayerOps(), make_linear)
    )


def cuda_modules(dtype: torch.dtype, device: torch.device) -> FusedModules:
    """Return the fastest replacements on a CUDA device: Triton's kernels if they pass their check, else plain torch."""
    return FusedModules(_cuda_ops(dtype, device), plain_linear)


def optimize_model(
    model: PreTrainedModel, port: AttentionPort, layers: Sequence[AttentionLayer], modules: FusedModules
) -> None:
    """Replace modules of `model` by `modules`. Results are equal up to rounding and the linear layers' quantization."""
    if can_fuse(model):
        model.model = modules.decoder(model.model, port, layers, modules.ops, modules.make_linear)
    replace_norms(model, modules.ops)
    replace_linears(model, modules.make_linear)


def _cuda_ops(dtype: torch.dtype, device: torch.device) -> LayerOps:
    try:
        # Only torch for CUDA installs Triton.
        from replicas.model.layers.triton_ops import TritonLayerOps, check_layer_ops
    except ImportError as error:
        fault: str | None = str(error)
    else:
        fault = check_layer_ops(dtype, device)
        if fault is None:
            return TritonLayerOps()
    _log.warning("layers use plain torch and are slow: Triton's kernels do not work here: %s", fault)
    return TorchLayerOps()
