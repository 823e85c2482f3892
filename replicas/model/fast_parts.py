"""Making a loaded model fast: parts that compute the same as transformers' own, in fewer or better operations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from replicas.model.attention import AttentionPort
from replicas.model.cpp_decoder import CppDecoder
from replicas.model.cpp_layer_math import CppLayerMath
from replicas.model.fused_decoder import FusedDecoder, can_fuse
from replicas.model.fused_norm import replace_norms
from replicas.model.kv_cache import AttentionLayer
from replicas.model.layer_math import LayerMath, TorchLayerMath
from replicas.model.linears import LinearFactory, choose_linears, plain_linear, replace_linears

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FastParts:
    """What a model's own parts are replaced by."""

    math: LayerMath
    make_linear: LinearFactory
    decoder: type[FusedDecoder] = FusedDecoder
    """For a model that can be fused."""


def cpu_parts(dtype: torch.dtype, has_kernels: bool, quantization: str) -> FastParts:
    """The fastest parts on CPU; `has_kernels` says whether the compiled kernels can be called.

    Raises:
        ModelLoadError: there is no such quantization, or no kernels for it.
    """
    make_linear = choose_linears(dtype, has_kernels, quantization)
    return (
        FastParts(CppLayerMath(), make_linear, CppDecoder) if has_kernels else FastParts(TorchLayerMath(), make_linear)
    )


def cuda_parts(dtype: torch.dtype, device: torch.device) -> FastParts:
    """The fastest parts on a CUDA device: Triton's kernels where they prove right, else plain torch."""
    return FastParts(_cuda_math(dtype, device), plain_linear)


def speed_up(model: PreTrainedModel, port: AttentionPort, layers: Sequence[AttentionLayer], parts: FastParts) -> None:
    """Replace parts of `model` by faster ones that compute the same, up to rounding and the linears' own precision."""
    if can_fuse(model):
        model.model = parts.decoder(model.model, port, layers, parts.math, parts.make_linear)
    replace_norms(model, parts.math)
    replace_linears(model, parts.make_linear)


def _cuda_math(dtype: torch.dtype, device: torch.device) -> LayerMath:
    try:
        # Triton comes with torch for CUDA only.
        from replicas.model.triton_layer_math import TritonLayerMath, check_layer_math
    except ImportError as error:
        fault: str | None = str(error)
    else:
        fault = check_layer_math(dtype, device)
        if fault is None:
            return TritonLayerMath()
    _log.warning("layers run in plain torch, slowly, as Triton's kernels do not work here: %s", fault)
    return TorchLayerMath()
