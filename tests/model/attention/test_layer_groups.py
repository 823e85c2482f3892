"""Groups of layers: few, of equal bytes, and each block of a group has a place of its own in every layer."""

from dataclasses import replace

import pytest
import torch

from bench.engine.models import GEMMA3_1B
from replicas.model.attention.kv_cache import AttentionLayer, bytes_per_block, with_cache
from replicas.model.attention.layer_groups import bytes_of_block, group_layers, grouped_cache
from replicas.model.diagnosis import memory_of

CPU = torch.device("cpu")
LONGEST = 131_072


def layers(
    num_layers: int, period: int, windowed: tuple[int, int, int], whole: tuple[int, int]
) -> list[AttentionLayer]:
    """Return layers of (heads, head size, window), each `period`-th without a window and of (heads, head size)."""
    return [
        AttentionLayer(index, heads, heads, size, size, window, None, False)
        for index in range(num_layers)
        for heads, size, window in [(*whole, None) if (index + 1) % period == 0 else windowed]
    ]


SHAPES = {
    "gemma 3 27b": (layers(62, 6, (16, 128, 1024), (16, 128)), 13, 1),
    "gemma 3 1b": (layers(26, 6, (1, 256, 512), (1, 256)), 7, 1),
    "gemma 4 31b": (layers(60, 6, (16, 256, 1024), (4, 512)), 11, 2),
    "gemma 4 e4b": (layers(24, 6, (2, 256, 512), (2, 512)), 7, 1),
    "gpt-oss-20b": (layers(24, 2, (8, 64, 128), (8, 64)), 2, 1),
    "mistral 7b": (layers(32, 99, (8, 128, 4096), (8, 128)), 1, 1),
}
"""Layers of a model, with their numbers of groups and of layers without a window in a column."""


@pytest.mark.parametrize("name", SHAPES)
def test_real_models_have_few_groups_and_little_padding(name: str) -> None:
    shapes, num_groups, per_column = SHAPES[name]
    groups = group_layers(shapes, LONGEST, torch.bfloat16)
    assert len(groups) == num_groups and groups[-1].layers_per_column == per_column
    assert [group.window is None for group in groups] == sorted(group.window is None for group in groups)
    assert sorted(layer.index for group in groups for layer in group.layers) == list(range(len(shapes)))
    num_bytes = len(groups) * bytes_of_block(groups, 16, torch.bfloat16)
    assert bytes_per_block(shapes, 16, torch.bfloat16) >= 0.91 * num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    "shapes", [layers(6, 3, (2, 16, 8), (2, 16)), layers(6, 3, (4, 16, 8), (2, 16)), layers(12, 3, (1, 16, 8), (4, 16))]
)
def test_blocks_of_all_groups_and_layers_have_places_of_their_own(
    shapes: list[AttentionLayer], dtype: torch.dtype
) -> None:
    shapes = [*shapes, replace(shapes[0], index=len(shapes), kv_source=0)]
    groups = group_layers(shapes, LONGEST, dtype)
    assert len(groups) > 1
    cache = grouped_cache(groups, 2 * len(groups), 4, dtype, CPU)
    owners = [(number, group, layer) for number, group in enumerate(groups) for layer in with_cache(group.layers)]
    for value, (number, group, layer) in enumerate(owners, 1):
        for block in (1 + number, 1 + len(groups) + number):
            for numbers, scales in cache[layer.index].parts:
                assert numbers.is_contiguous() and numbers[block * group.layers_per_column].abs().sum() == 0
                numbers[block * group.layers_per_column] = value
                if scales is not None:
                    scales[block * group.layers_per_column] = value
    for value, (number, group, layer) in enumerate(owners, 1):
        for numbers, scales in cache[layer.index].parts:
            for part in filter(None.__ne__, (numbers, scales)):
                assert part is not None and (part[(1 + number) * group.layers_per_column] == value).all()
    assert cache[len(shapes) - 1] is cache[0]


def test_sizes_that_do_not_fit_together_and_short_lengths_leave_one_group() -> None:
    odd = layers(6, 3, (3, 16, 8), (2, 16))
    assert [group.window for group in group_layers(odd, LONGEST, torch.float32)] == [None]
    # Two blocks of four narrow layers would have two places too many.
    padded = layers(9, 3, (1, 16, 8), (4, 16))
    assert [group.window for group in group_layers(padded, LONGEST, torch.float32)] == [None]
    shapes = SHAPES["gpt-oss-20b"][0]
    assert [group.window for group in group_layers(shapes, 128, torch.float32)] == [None]
    # Scales of 8-bit numbers are one for each head, whatever its size.
    assert len(group_layers(SHAPES["gemma 4 31b"][0], LONGEST, torch.int8)) == 1


def test_a_layer_that_sees_all_keys_of_a_windowed_one_keeps_them() -> None:
    shapes = layers(4, 9, (2, 16, 8), (2, 16))
    whole = replace(shapes[0], index=4, window=None, kv_source=1)
    windows = {
        layer.index: group.window
        for group in group_layers([*shapes, whole], LONGEST, torch.float32)
        for layer in group.layers
    }
    assert windows == {0: 8, 1: None, 2: 8, 3: 8, 4: None}


@pytest.mark.parametrize(("is_gpu", "num_ahead"), [(False, 512), (True, 2 * 2048)])
def test_the_memory_of_a_long_request_counts_windows_and_the_steps_ahead(is_gpu: bool, num_ahead: int) -> None:
    memory = memory_of(GEMMA3_1B, torch.bfloat16, is_gpu=is_gpu)
    num_window_blocks = 1 - (1 - 512 - num_ahead) // 16
    # Six groups of four layers have the window, and the last group sees all tokens.
    num_blocks = 6 * num_window_blocks + 32_768 // 16
    assert memory.kv_bytes_of_longest == num_blocks * 4 * 16 * memory.kv_bytes_per_token // 26
