"""Groups of layers: those of one window share a block table, so that blocks behind the window can be given back.

A block of the KV cache holds the tokens of one group. All groups take equal bytes of it, so that one pool of blocks
serves all. For that, the layers of a window are cut into several groups. A block is cut into columns, each as large as
the keys and values of the widest layer, which may be those of several narrower layers instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replicas.model.attention.interface import AttentionBackend, AttentionCall, AttentionContext
from replicas.model.attention.kv_cache import AttentionLayer, KVCache, LayerGroup, bytes_per_block, with_cache
from replicas.model.batch.inputs import BatchInputs

_MAX_GROUPS = 16
"""Most groups: each costs the host time in every step."""
_MAX_PADDING = 1 / 12
"""Largest share of the blocks' bytes that no layer uses."""


def group_layers(layers: Sequence[AttentionLayer], max_model_len: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
    """Return the groups of a model's layers, for a cache of `dtype`; those without a window are the last.

    A window of at least `max_model_len` tokens counts as none. All layers are in one group if their sizes do not fit
    together.
    """
    kinds: dict[int | None, list[AttentionLayer]] = {}
    for layer in with_cache(layers):
        kinds.setdefault(_window(layer, layers, max_model_len), []).append(layer)
    windows = sorted(kinds, key=lambda window: (window is None, window))
    if len(windows) == 1:
        return (LayerGroup(tuple(layers), windows[0]),)
    whole = one_group(layers)
    if any(len({_narrowness(layer, layers, dtype) for layer in kinds[window]}) > 1 for window in windows):
        return whole
    parts = {window: _narrowness(kinds[window][0], layers, dtype) for window in windows}
    if None in parts.values():
        return whole
    num_needed = sum(len(kinds[window]) / (parts[window] or 1) for window in windows)

    def num_groups(num_columns: int) -> int:
        return sum(-(-len(kinds[window]) // (num_columns * (parts[window] or 1))) for window in windows)

    def is_possible(num_columns: int) -> bool:
        padding = 1 - num_needed / (num_groups(num_columns) * num_columns)
        return num_groups(num_columns) <= _MAX_GROUPS and padding <= _MAX_PADDING

    possible = [num_columns for num_columns in range(1, len(layers) + 1) if is_possible(num_columns)]
    if not possible:
        return whole
    num_columns = min(possible, key=lambda number: (num_groups(number), number))
    groups = []
    for window in windows:
        num_parts = parts[window] or 1
        size = num_columns * num_parts
        for first in range(0, len(kinds[window]), size):
            group = kinds[window][first : first + size]
            groups.append(LayerGroup((*group, *_sharing(group, layers)), window, num_parts, num_columns))
    return tuple(groups)


def one_group(layers: Sequence[AttentionLayer]) -> tuple[LayerGroup, ...]:
    """Return one group of all layers, which keeps the whole length of all."""
    return (LayerGroup(tuple(layers), None),)


def _sharing(group: Sequence[AttentionLayer], layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Return the layers that use the keys and values of those in `group`."""
    indices = {layer.index for layer in group}
    return [layer for layer in layers if layer.kv_source in indices]


def _window(owner: AttentionLayer, layers: Sequence[AttentionLayer], max_model_len: int) -> int | None:
    """Return the window in which all layers with the keys and values of `owner` see them."""
    windows = [owner.window, *(layer.window for layer in _sharing([owner], layers))]
    window = max((max_model_len if window is None else window for window in windows), default=max_model_len)
    return window if window < max_model_len else None


def _narrowness(layer: AttentionLayer, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int | None:
    """Return the number of layers like `layer` that take the place of the widest one; None: it is no whole number."""
    widest = max(with_cache(layers), key=lambda other: other.num_numbers)
    number, rest = divmod(widest.num_numbers, layer.num_numbers)
    narrow = (layer.num_kv_heads * layer.key_size, layer.num_kv_heads * layer.value_size, layer.has_values_in_keys)
    wide = (widest.num_kv_heads * widest.key_size, widest.num_kv_heads * widest.value_size, widest.has_values_in_keys)
    are_equal = rest == 0 and (narrow[0] * number, narrow[1] * number, narrow[2]) == wide
    has_scales = dtype.itemsize == 1
    are_scales_equal = not has_scales or layer.num_kv_heads * number == widest.num_kv_heads
    return number if are_equal and are_scales_equal else None


def bytes_of_block(groups: Sequence[LayerGroup], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block, in bytes."""
    if len(groups) == 1:
        return bytes_per_block(groups[0].layers, block_size, dtype)
    return groups[0].num_columns * max(bytes_per_block([layer], block_size, dtype) for layer in _owners(groups))


def grouped_cache(
    groups: Sequence[LayerGroup], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Return a cache of `num_blocks` blocks, of which each may belong to any of `groups`."""
    if len(groups) == 1:
        cache = KVCache(groups[0].layers, num_blocks, block_size, dtype, device)
        cache.groups = tuple(groups)
        return cache
    widest = max(_owners(groups), key=lambda layer: layer.num_numbers)
    columns = KVCache(
        [replace(widest, index=index) for index in range(groups[0].num_columns)], num_blocks, block_size, dtype, device
    )
    return columns.shared_by(groups)


def _owners(groups: Sequence[LayerGroup]) -> list[AttentionLayer]:
    return with_cache(layer for group in groups for layer in group.layers)


class GroupedAttention:
    """Attention of one forward pass over several groups of layers, each with inputs and a context of its own."""

    def __init__(self, backend: AttentionBackend, cache: KVCache, inputs: BatchInputs) -> None:
        contexts = [backend(cache, of_group) for of_group in (inputs, *inputs.more)]
        self._contexts: dict[int, AttentionContext] = {
            layer.index: context
            for group, context in zip(cache.groups, contexts, strict=True)
            for layer in group.layers
        }

    def attend(self, call: AttentionCall) -> Tensor:
        """Pass the call to the context of its layer."""
        return self._contexts[call.layer].attend(call)
