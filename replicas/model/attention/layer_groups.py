"""Groups of layers: those of one window share a block table, so that blocks behind the window can be given back.

A block of the KV cache holds the tokens of one group. All groups take equal bytes of it, so that one pool of blocks
serves all. For that, the layers of a window are cut into several groups. A block is cut into columns, each as large as
the keys and values of the widest layer, which may be those of several narrower layers instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.model.attention.interface import AttentionCall, AttentionContext
from replicas.model.attention.kv_cache import (
    AttentionLayer,
    KVCache,
    LayerGroup,
    bytes_per_block,
    is_quantized,
    num_tensors,
    with_cache,
)

_MAX_GROUPS = 16
"""Most groups: each costs the host time in every step."""
_MAX_PADDING = 1 / 12
"""Largest share of the bytes for the layers of one window that none of them uses."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one window and size, of which `per_column` take the place of the widest layer."""

    window: int | None
    per_column: int
    layers: list[AttentionLayer]

    def num_groups(self, num_columns: int) -> int:
        """Return the number of groups if a block has `num_columns` columns."""
        return -(-len(self.layers) // (num_columns * self.per_column))

    def fills(self, num_columns: int) -> bool:
        """Return True if few places of the groups' columns have no layer."""
        num_places = self.num_groups(num_columns) * num_columns * self.per_column
        return num_places - len(self.layers) <= num_places * _MAX_PADDING

    def groups(self, num_columns: int) -> list[list[AttentionLayer]]:
        """Return the layers of each group."""
        size = num_columns * self.per_column
        return [self.layers[first : first + size] for first in range(0, len(self.layers), size)]


def group_layers(layers: Sequence[AttentionLayer], max_model_len: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
    """Return the groups of a model's layers, for a cache of `dtype`; those without a window are the last.

    There are as few groups as the padding allows. A window of at least `max_model_len` tokens counts as none. All
    layers are in one group if their sizes do not fit together.
    """
    owners = with_cache(layers)
    windows = {layer.index: _window(layer, layers, max_model_len) for layer in owners}
    if len(set(windows.values())) == 1:
        return (LayerGroup(tuple(layers), windows[owners[0].index]),)
    whole = (LayerGroup(tuple(layers), None),)
    widest = max(owners, key=lambda layer: layer.num_numbers)
    by_kind: dict[tuple[int | None, int], list[AttentionLayer]] = {}
    for layer in owners:
        per_column = _per_column(layer, widest, dtype)
        if per_column is None:
            return whole
        by_kind.setdefault((windows[layer.index], per_column), []).append(layer)
    kinds = [_Kind(*kind, of_kind) for kind, of_kind in by_kind.items()]
    numbers = {
        num_columns: sum(kind.num_groups(num_columns) for kind in kinds)
        for num_columns in range(1, len(owners) + 1)
        if all(kind.fills(num_columns) for kind in kinds)
    }
    num_columns = min(numbers, key=numbers.__getitem__, default=None)
    if num_columns is None or numbers[num_columns] > _MAX_GROUPS:
        return whole
    groups = [
        LayerGroup((*group, *_sharing(group, layers)), kind.window, kind.per_column, num_columns)
        for kind in kinds
        for group in kind.groups(num_columns)
    ]
    return tuple(sorted(groups, key=lambda group: (group.window is None, group.window or 0)))


def _sharing(group: Sequence[AttentionLayer], layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Return the layers that use the keys and values of those in `group`."""
    indices = {layer.index for layer in group}
    return [layer for layer in layers if layer.kv_source in indices]


def _window(owner: AttentionLayer, layers: Sequence[AttentionLayer], max_model_len: int) -> int | None:
    """Return the window in which all layers with the keys and values of `owner` see them."""
    windows = [owner.window, *(layer.window for layer in _sharing([owner], layers))]
    window = max((max_model_len if window is None else window for window in windows), default=max_model_len)
    return window if window < max_model_len else None


def _per_column(layer: AttentionLayer, widest: AttentionLayer, dtype: torch.dtype) -> int | None:
    """Return the number of layers like `layer` that take the place of the widest one; None: it is no whole number."""
    number = widest.num_numbers // layer.num_numbers
    is_narrower = all(
        of_layer * number == of_widest for of_layer, of_widest in zip(_sizes(layer), _sizes(widest), strict=True)
    )
    has_fitting_scales = not is_quantized(dtype) or layer.num_kv_heads * number == widest.num_kv_heads
    is_alike = layer.has_values_in_keys == widest.has_values_in_keys
    return number if is_narrower and is_alike and has_fitting_scales else None


def _sizes(layer: AttentionLayer) -> tuple[int, int]:
    return layer.num_kv_heads * layer.key_size, layer.num_kv_heads * layer.value_size


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


def num_cache_tensors(groups: Sequence[LayerGroup], dtype: torch.dtype) -> int:
    """Return the number of tensors of a cache of `groups`."""
    owners = _owners(groups)
    return num_tensors(owners if len(groups) == 1 else owners[: groups[0].num_columns], dtype)


def _owners(groups: Sequence[LayerGroup]) -> list[AttentionLayer]:
    return with_cache(layer for group in groups for layer in group.layers)


def attention_by_group(groups: Sequence[LayerGroup], contexts: Sequence[AttentionContext]) -> AttentionContext:
    """Return the attention of a forward pass in which each group of layers has a context of its own."""
    return contexts[0] if len(contexts) == 1 else _GroupedAttention(groups, contexts)


class _GroupedAttention:
    def __init__(self, groups: Sequence[LayerGroup], contexts: Sequence[AttentionContext]) -> None:
        self._contexts = {
            layer.index: context for group, context in zip(groups, contexts, strict=True) for layer in group.layers
        }

    def attend(self, call: AttentionCall) -> Tensor:
        """Pass the call to the context of its layer."""
        return self._contexts[call.layer].attend(call)
