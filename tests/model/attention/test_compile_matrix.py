"""Attention kernels fit every device: its registers, shared memory, multiprocessors and widths of loads.

The shapes are those of served models. A device is not needed: triton's wheel has the assembler.
"""

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from replicas.model.attention.triton import LayerShape, choose_tile
from replicas.model.attention.triton_kernels import attend_kernel
from tests.model.attention.test_triton_compilation import PLAIN, compiled, not_interpreted, widths

pytestmark = [not_interpreted, pytest.mark.rotated]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def shape(num_kv_heads: int, group_size: int, key_size: int, value_size: int | None = None) -> LayerShape:
    return LayerShape(num_kv_heads, group_size, key_size, value_size or key_size, itemsize=2)


def latent(num_heads: int, latent_size: int, rotary_size: int) -> LayerShape:
    """Return the shape that `layer_shape` makes of latent attention."""
    group_size = next(size for size in range(16, 0, -1) if num_heads % size == 0)
    num_kv_heads = num_heads // group_size
    return LayerShape(num_kv_heads, group_size, latent_size + rotary_size, latent_size, 2, True, num_kv_heads)


WINDOW, CAPPED, SINKS = (
    {"HAS_WINDOW": True},
    {"HAS_WINDOW": True, "HAS_SOFTCAP": True},
    {"HAS_WINDOW": True, "HAS_SINKS": True},
)
LAYERS: dict[str, tuple[LayerShape, dict[str, bool]]] = {
    "llama-3.2-1b": (shape(8, 4, 64), {}),
    "llama-3.1-8b": (shape(8, 4, 128), {}),
    "smollm2-135m": (shape(3, 3, 64), {}),
    "qwen2.5-0.5b": (shape(2, 7, 64), {}),
    "qwen2.5-7b": (shape(4, 7, 128), {}),
    "qwen3-30b-a3b": (shape(4, 8, 128), {}),
    "mistral-7b": (shape(8, 4, 128), WINDOW),
    "gemma-2b": (shape(1, 8, 256), {}),
    "gemma-2-9b": (shape(8, 2, 256), CAPPED),
    "gemma-4-31b": (shape(16, 2, 256), WINDOW),
    "gemma-4-31b-whole": (shape(4, 8, 512), {}),
    "phi-2": (shape(32, 1, 80), {}),
    "phi-3-mini": (shape(32, 1, 96), WINDOW),
    "gpt2": (shape(12, 1, 64), {}),
    "gpt-oss-20b": (shape(8, 8, 64), SINKS),
    "deepseek-v2-lite": (latent(16, 512, 64), {}),
    "deepseek-v3": (latent(128, 512, 64), {}),
    "glm-4.7-flash": (latent(20, 512, 64), {}),
    "minicpm3-4b": (latent(40, 256, 32), {}),
    "deepseek-v2-lite-expanded": (shape(16, 1, 192, 128), {}),
    "starcoder": (shape(1, 48, 128), {}),
}


@dataclass(frozen=True)
class Device:
    """Limits of a compute capability."""

    shared_kib: int
    """Most shared memory of a program."""
    processor_kib: int
    """Shared memory of a multiprocessor."""
    max_stack: int
    """Bytes that the registers of a thread may lack."""


DEVICES = {
    80: Device(163, 164, 64),
    86: Device(99, 100, 64),
    89: Device(99, 100, 64),
    90: Device(227, 228, 0),
    100: Device(227, 228, 0),
    120: Device(99, 100, 64),
}
KINDS = {"decode": (True, False), "split": (True, True), "prefill": (False, False)}

# Exceptions from the bounds, with their reasons.
LARGE_GROUP = {"starcoder"}
"""48 query rows of one KV head: 64 rows of a decode need the shared memory of half a multiprocessor, or more."""


@dataclass(frozen=True)
class Resources:
    """Registers, stack and shared memory of a compiled kernel on a multiprocessor."""

    registers: int
    stack: int
    shared: int
    num_warps: int

    def num_programs(self, device: Device) -> int:
        """Return the programs that one multiprocessor runs at a time."""
        per_warp = math.ceil(self.registers * 32 / 256) * 256
        by_registers = 65536 // (per_warp * self.num_warps)
        return min(by_registers, device.processor_kib * 1024 // (self.shared + 1024))


def resources(kernel: Any) -> Resources:
    return Resources(*usage(kernel.asm["cubin"]), kernel.metadata.shared, kernel.metadata.num_warps)


def usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert found is not None, output
    return int(found[1]), int(found[2])


def attention(name: str, kind: str, capability: int, bits: dict[str, bool] | None = None) -> Any:
    layer, scores = LAYERS[name]
    layer = replace(layer, is_quantized=bits is not None)
    is_decode, is_split = KINDS[kind]
    tile = choose_tile(layer, is_decode, capability)
    constants = {
        **widths(layer), **PLAIN, **scores, **(bits or {}), "GROUP_SIZE": layer.group_size, "BLOCK_SIZE": 16,
        "TILE_ROWS": tile.rows, "TILE_KEYS": tile.keys, "IS_SPLIT": is_split,
        "STRIDE_ALIGNMENT": 16,
    }  # fmt: skip
    return compiled(
        attend_kernel, layer, capability, constants, tile.num_warps, tile.num_stages, has_bytes=bits is not None
    )


QUICK = {
    ("llama-3.1-8b", "prefill", 90), ("llama-3.1-8b", "split", 80), ("qwen2.5-7b", "prefill", 80),
    ("gemma-2-9b", "prefill", 89), ("gpt-oss-20b", "decode", 120), ("gemma-2-9b", "prefill", 100),
    ("deepseek-v3", "split", 80), ("deepseek-v3", "prefill", 90),
}  # fmt: skip
MATRIX = [(name, kind, capability) for name in LAYERS for kind in KINDS for capability in DEVICES]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "kind", "capability"),
    [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep) for cell in MATRIX],
)
def test_the_kernel_fits_the_device(name: str, kind: str, capability: int) -> None:
    kernel, device = attention(name, kind, capability), DEVICES[capability]
    taken, ptx = resources(kernel), kernel.asm["ptx"]
    assert taken.shared <= device.shared_kib * 1024
    if name not in LARGE_GROUP:
        assert taken.stack <= device.max_stack
    if kind != "prefill" and capability in (80, 90) and name not in LARGE_GROUP:
        assert taken.num_programs(device) >= 2
    if kind == "prefill" and capability == 90:
        assert "wgmma" in ptx
    if kind == "prefill" and (capability, LAYERS[name][0].key_width) != (100, 64):
        assert re.search(r"cp\.async\.ca\.shared\.global", ptx), "block ids are not copied ahead"
    if "HAS_SINKS" not in LAYERS[name][1]:  # A row's sink is one number.
        assert not re.search(r"ld\.global[.\w]*\.b16", ptx)


BYTES = {"int8": {"HAS_SCALES": True}, "fp8": {"HAS_SCALES": True, "IS_FLOAT8": True}}
QUICK_BYTES = {("llama-3.1-8b", "split", 80, "int8"), ("llama-3.1-8b", "prefill", 90, "fp8")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "kind", "capability", "bits"),
    [
        cell if cell in QUICK_BYTES else pytest.param(*cell, marks=pytest.mark.deep)
        for cell in ((*cell, bits) for cell in MATRIX if cell[2] in (80, 89, 90) for bits in BYTES)
    ],
)
def test_the_kernel_over_8_bits_fits_the_device(name: str, kind: str, capability: int, bits: str) -> None:
    kernel, device = attention(name, kind, capability, BYTES[bits]), DEVICES[capability]
    taken, ptx = resources(kernel), kernel.asm["ptx"]
    assert taken.shared <= device.shared_kib * 1024
    if name not in LARGE_GROUP:
        assert taken.stack <= max(64, device.max_stack)
        if kind != "prefill":
            assert taken.num_programs(device) >= 2
    if kind == "prefill" and capability == 90:
        assert "wgmma" in ptx
    # 4 bytes would be block ids and scales alone. A warp's share of a tile with heads of 64 is 8 bytes a thread.
    assert re.search(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x(8|10)\b", ptx), "keys are not copied ahead"


def test_a_decode_over_8_bits_has_tiles_of_as_many_bytes_where_two_programs_fit() -> None:
    for name, wide, narrow in (("llama-3.1-8b", 64, 128), ("gemma-2b", 32, 64), ("deepseek-v3", 16, 16)):
        for capability in DEVICES:
            keys = [
                choose_tile(replace(LAYERS[name][0], is_quantized=is_quantized), True, capability).keys
                for is_quantized in (False, True)
            ]
            assert keys == [wide, narrow if capability in (80, 90, 100) else wide]
