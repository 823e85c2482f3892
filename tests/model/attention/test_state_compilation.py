"""Kernels of recurrent layers fit every device, of which none is needed, without spills. The models are real ones."""

from typing import Any

import pytest

pytest.importorskip("triton")

from replicas.model.attention import state_triton
from replicas.model.attention.state_cache import StateLayer
from replicas.model.attention.state_kernels import (
    advance_kernel,
    assign_rows_kernel,
    convolve_kernel,
    decode_kernel,
    store_inputs_kernel,
)
from tests.model.attention.test_compile_matrix import DEVICES, Resources, resources
from tests.model.attention.test_triton_compilation import compiled_as, not_interpreted

pytestmark = not_interpreted

LAYERS = {
    "qwen3.5-0.8b": StateLayer(0, 6144, 4, 16, 16, 128, 128),
    "qwen3.5-4b": StateLayer(0, 8192, 4, 32, 16, 128, 128),
    "qwen3.5-27b": StateLayer(0, 10_240, 4, 48, 16, 128, 128),
    "olmo-hybrid-7b": StateLayer(0, 11_520, 4, 30, 30, 96, 192),
    "nemotron-h-8b": StateLayer(0, 10_240, 4, 128, 8, 128, 64),
    "granite-4-h-small": StateLayer(0, 8448, 4, 128, 1, 128, 64),
    "falcon-h1-7b": StateLayer(0, 3584, 4, 24, 1, 256, 128),
}
DELTA = {"qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b", "olmo-hybrid-7b"}
QUICK = {("qwen3.5-4b", 80), ("qwen3.5-4b", 90), ("nemotron-h-8b", 120)}
MATRIX = [(name, capability) for name in LAYERS for capability in DEVICES]
_TYPES = {
    **dict.fromkeys(("chunks", "chunk_of_row"), "*i32"),
    **dict.fromkeys(("states", "keys", "updates", "decays", "rates", "biases"), "*fp32"),
    **dict.fromkeys(("num_rows", "row_stride", "query_stride", "key_stride", "value_stride", "gate_stride"), "i32"),
    "scale": "fp32",
}


def compiled(kernel: Any, capability: int, constants: dict[str, Any], num_stages: int = 3) -> Resources:
    signature = {name: "constexpr" if name in constants else _TYPES.get(name, "*bf16") for name in kernel.arg_names}
    return resources(compiled_as(kernel, signature, constants, capability, num_stages=num_stages))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "capability"), [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep) for cell in MATRIX]
)
def test_the_kernels_of_the_state_fit_the_device(name: str, capability: int) -> None:
    layer, is_delta = LAYERS[name], name in DELTA
    rule = {
        "NUM_HEADS": layer.num_heads, "NUM_KEY_HEADS": layer.num_key_heads, "KEY_SIZE": layer.key_size,
        "VALUE_SIZE": layer.value_size, "BLOCK_SIZE": 16, "BLOCK_WIDTH": 16, "STRIDE_ALIGNMENT": 16,
        **dict.fromkeys(("HAS_NORM", "HAS_GATES", "HAS_BETA"), is_delta),
    }  # fmt: skip
    decode = compiled(
        decode_kernel,
        capability,
        {**rule, "KEY_WIDTH": state_triton._width(layer.key_size), "VALUE_TILE": state_triton._DECODE_TILE},
    )
    advance = compiled(
        advance_kernel,
        capability,
        {**rule, "KEY_PART": state_triton._KEY_PART, "VALUE_TILE": state_triton._VALUE_TILE},
        state_triton._NUM_STAGES,
    )
    for taken, num_programs in ((decode, 3), (advance, 2)):
        assert taken.stack == 0
        assert taken.num_programs(DEVICES[capability]) >= num_programs


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(one, marks=pytest.mark.deep) for one in DEVICES if one != 90)]
)
def test_the_kernels_of_the_convolution_fit_the_device(capability: int) -> None:
    convolution = {
        "NUM_CHANNELS": 8192, "WIDTH": 4, "BLOCK_SIZE": 16, "TILE_ROWS": state_triton._CONVOLVED_ROWS,
        "TILE_CHANNELS": state_triton._CONVOLVED_CHANNELS, "STRIDE_ALIGNMENT": 16,
    }  # fmt: skip
    for tile_rows in (1, state_triton._CONVOLVED_ROWS):
        constants = {**convolution, "TILE_ROWS": tile_rows, "HAS_BIAS": True, "HAS_SILU": True}
        assert compiled(convolve_kernel, capability, constants).stack == 0
    assert compiled(store_inputs_kernel, capability, convolution).stack == 0
    assert compiled(assign_rows_kernel, capability, {"TILE": state_triton._ASSIGNED_ROWS}).stack == 0
