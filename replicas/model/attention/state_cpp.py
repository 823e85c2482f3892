"""Backend of recurrent state in the compiled C++ kernels, on a CPU.

A token's numbers have the same bits whatever the steps in which its block is computed. The arithmetic is in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.attention.recurrent import ConvCall, RuleCall
from replicas.model.attention.state_cache import StateCache, StateLayer
from replicas.model.batch.inputs import BatchInputs

# Numbers per vector: the kernels read channels and heads in such pieces.
_UNIT = 16


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """Constants of a mixer of the gated delta rule, beside its linear layers."""

    conv_weight: Tensor  # [num_channels, width]; channels are the queries, keys and values of all heads
    rates: Tensor  # [num_heads] float32, of the decay: rate * softplus(a + bias)
    biases: Tensor  # [num_heads] float32
    beta_scale: float
    """Factor of beta, which is then scale * sigmoid(b)."""
    norm: Tensor  # [value_size]
    epsilon: float


def can_advance(layers: Iterable[StateLayer]) -> bool:
    """Return True if `CppStates` supports `layers`."""
    return all(size % _UNIT == 0 for layer in layers for size in (layer.num_channels, layer.key_size, layer.value_size))


class CppStates:
    """Recurrent state of one forward pass in the compiled kernels. `can_advance` must be True."""

    def __init__(self, cache: StateCache, inputs: BatchInputs) -> None:
        self.cache = cache
        chunks: list[tuple[int, ...]] = []
        snapshots: list[tuple[int, int]] = []
        for chunk in inputs.chunks:
            first, move = len(snapshots), chunk.state
            snapshots += move.snapshots
            chunks.append((chunk.row, chunk.start, chunk.end, move.source, move.target, first, len(snapshots)))
        self.plan = (
            torch.tensor(chunks, dtype=torch.int64),
            torch.tensor(snapshots, dtype=torch.int64).view(-1, 2),
        )
        """Chunks [num_chunks, 7] and snapshots [num_snapshots, 2], as `StateChunk` and `Snapshot` in recurrent.h."""

    def convolve(self, call: ConvCall) -> Tensor:
        """Convolve the call's channels, after those of earlier steps; store what later steps need."""
        output: Tensor = torch.ops.headway.convolve_states.default(
            call.inputs, call.weight.contiguous(), call.bias, call.has_silu, self.cache[call.layer].inputs, *self.plan
        )
        return output

    def advance(self, call: RuleCall) -> Tensor:
        """Advance the states of the call's layer, block by block, and store them."""
        layer, call = self.cache[call.layer], call.prepared()
        parts = (call.query, call.key, call.value, call.decay, call.beta)
        output: Tensor = torch.ops.headway.advance_states.default(
            *(None if part is None else part.contiguous() for part in parts),
            layer.states,
            layer.keys,
            layer.updates,
            layer.decays,
            *self.plan,
        )
        return output

    def mix(self, layer: int, rows: Tensor, parts: DeltaParts) -> Tensor:
        """Convolve, apply the gated delta rule, normalize and gate; return [num_tokens, num_heads * value_size].

        Each of `rows` has the channels of the convolution, the gate of the norm, b and a.
        """
        states = self.cache[layer]
        output: Tensor = torch.ops.headway.mix_by_delta_rule.default(
            rows,
            parts.conv_weight,
            parts.rates,
            parts.biases,
            parts.beta_scale,
            parts.norm,
            parts.epsilon,
            states.inputs,
            states.states,
            states.keys,
            states.updates,
            states.decays,
            *self.plan,
        )
        return output
