"""Cache of recurrent state: the tensors of the state slots.

A slot has the state of each recurrent layer at a boundary between blocks, and the tail: what the layer keeps of the
tokens since, at most a block. The state is float32, as rounding errors would add up over a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.hardware.huge_pages import huge_zeros


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Shape of one recurrent layer's state. Layers with a convolution alone have no heads."""

    index: int
    num_channels: int
    conv_width: int
    """Number of tokens that a convolution sees, its own included."""
    num_heads: int = 0
    num_key_heads: int = 0
    key_size: int = 0
    value_size: int = 0

    @property
    def tail_numbers(self) -> int:
        """Numbers that the rule keeps of one token: its key, and of each head its update and its decay."""
        return self.num_key_heads * self.key_size + self.num_heads * (self.value_size + 1)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of one layer in all slots. Row i of a tail belongs to the i-th token after the slot's boundary."""

    inputs: Tensor
    """[num_slots + 1, conv_width - 1 + block_size, num_channels]: inputs of the convolution, from those of the last
    conv_width - 1 tokens before the boundary."""
    states: Tensor  # [num_slots + 1, num_heads, key_size, value_size] float32
    keys: Tensor  # [num_slots + 1, num_key_heads, block_size, key_size] float32
    updates: Tensor  # [num_slots + 1, num_heads, block_size, value_size] float32
    decays: Tensor  # [num_slots + 1, num_heads, block_size] float32


class StateCache:
    """State slots of all recurrent layers of one model. Slot 0 is scratch; sequences hold slots 1..num_slots."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        num_slots: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            shape = (num_slots + 1, *shape)
            return huge_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

        self._layers = {
            layer.index: LayerStates(
                zeros(layer.conv_width - 1 + block_size, layer.num_channels, dtype=dtype),
                zeros(layer.num_heads, layer.key_size, layer.value_size),
                zeros(layer.num_key_heads, block_size, layer.key_size),
                zeros(layer.num_heads, block_size, layer.value_size),
                zeros(layer.num_heads, block_size),
            )
            for layer in layers
        }

    def __getitem__(self, layer: int) -> LayerStates:
        return self._layers[layer]


def bytes_per_slot(layers: Iterable[StateLayer], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one slot over all layers, in bytes."""
    return sum(
        (layer.conv_width - 1 + block_size) * layer.num_channels * dtype.itemsize
        + (layer.num_heads * layer.key_size * layer.value_size + block_size * layer.tail_numbers)
        * torch.float32.itemsize
        for layer in layers
    )
