"""Fused decoder that runs all its layers in one call of the compiled C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from replicas.model.attention.cpp import CppAttention
from replicas.model.layers.fused_decoder import FusedDecoder, FusedLayer
from replicas.model.layers.linear import CompiledLinear
from replicas.model.layers.ops import Norm, RotaryCosSin


class CppDecoder(FusedDecoder):
    """`FusedDecoder` that runs all layers in one kernel call, which releases Python's GIL. It needs the kernels.

    A decoder with linear layers that are not compiled, or whose layers differ in shape or epsilon, runs as a
    `FusedDecoder`. So does a step whose attention is not `CppAttention`.
    """

    @cached_property
    def _stack(self) -> _Stack | None:
        return _stack(self._layers)

    def _run_layers(self, residual: Tensor, cos_sin: RotaryCosSin) -> Tensor | None:
        attention, stack = self._port.context, self._stack
        if stack is None or not isinstance(attention, CppAttention):
            return super()._run_layers(residual, cos_sin)
        caches = [attention.cache[index] for index in stack.indices]
        update: Tensor = torch.ops.headway.run_layers.default(
            residual,
            cos_sin.cos,
            cos_sin.sin,
            stack.parts,
            stack.num_query_heads,
            stack.epsilon,
            [cache.keys for cache in caches],
            [cache.values for cache in caches],
            [cache.key_scales for cache in caches if cache.key_scales is not None],
            [cache.value_scales for cache in caches if cache.value_scales is not None],
            attention.slots,
            attention.chunks,
            attention.tables,
            stack.scales,
            stack.windows,
        )
        return update


@dataclass(frozen=True, slots=True)
class _Stack:
    """Arguments of the kernel call that are constant for all steps."""

    parts: list[Tensor | None]
    """Tensors of each layer, in the order in which `read_layer` in decoder.h reads them."""
    num_query_heads: int
    epsilon: float
    indices: list[int]
    scales: list[float]
    windows: list[int]
    """Attention window of each layer; 0: none."""


def _stack(layers: Sequence[FusedLayer]) -> _Stack | None:
    """Return the constant arguments; None if the layers are not compiled or differ in shape or epsilon."""
    parts: list[Tensor | None] = []
    sizes: set[tuple[object, ...]] = set()
    for layer in layers:
        modules = (layer.query_key_value, layer.output, layer.gate_up, layer.down)
        linears = [module for module in modules if isinstance(module, CompiledLinear)]
        if len(linears) < len(modules):
            return None
        query_key_value, output, gate_up, down = (linear.parts() for linear in linears)
        norms = (_weight(layer.heads.query_norm), _weight(layer.heads.key_norm))
        parts += [layer.input_norm.weight, *query_key_value, *norms, *output]
        parts += [layer.post_attention_norm.weight, *gate_up, *down]
        sizes.add(
            (
                layer.heads.num_query_heads,
                layer.heads.num_kv_heads,
                *((linear.out_features, linear.in_features) for linear in linears),
            )
        )
    epsilons = {norm.epsilon for layer in layers for norm in _norms(layer)}
    if len(epsilons) != 1 or len(sizes) != 1:
        return None
    return _Stack(
        parts,
        layers[0].heads.num_query_heads,
        epsilons.pop(),
        [layer.spec.index for layer in layers],
        [layer.scoring.scale for layer in layers],
        [layer.spec.window or 0 for layer in layers],
    )


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _norms(layer: FusedLayer) -> list[Norm]:
    all_norms = (layer.input_norm, layer.post_attention_norm, layer.heads.query_norm, layer.heads.key_norm)
    return [norm for norm in all_norms if norm is not None]
