"""Making a loaded model fast on CPU."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from replicas.model.attention import AttentionPort
from replicas.model.cpp_layer_math import CppLayerMath
from replicas.model.fused_decoder import FusedDecoder, can_fuse
from replicas.model.fused_norm import replace_norms
from replicas.model.layer_math import LayerMath, TorchLayerMath
from replicas.model.linears import Linears, replace_linears
from replicas.model.probe import AttentionLayer


def speed_up(
    model: PreTrainedModel,
    port: AttentionPort,
    layers: Sequence[AttentionLayer],
    linears: Linears,
    has_kernels: bool,
) -> None:
    """Replace parts of `model` by faster ones that compute the same, up to rounding and the linears' own precision.

    `has_kernels` says whether the compiled kernels can be called.
    """
    math: LayerMath = CppLayerMath() if has_kernels else TorchLayerMath()
    if can_fuse(model):
        model.model = FusedDecoder(model.model, port, layers, math, linears.make)
    replace_norms(model, math)
    replace_linears(model, linears)
