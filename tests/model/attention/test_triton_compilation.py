"""Triton's kernels compile for real devices, of which none is needed; its interpreter also runs code that does not."""

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replicas.model.attention.triton import LayerShape, choose_tile
from replicas.model.attention.triton_kernels import (
    MAX_PARTS,
    attend_kernel,
    combine_kernel,
    plan_kernel,
    write_kernel,
)
from replicas.model.layers.triton_kernels import (
    add_and_normalize_kernel,
    embed_kernel,
    rotary_embedding_kernel,
    silu_and_mul_kernel,
)

not_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
)
pytestmark = not_interpreted

# Compute capability, and the shared memory that a program may have. 8.9 has least of those since 2020.
AMPERE, ADA, HOPPER = (80, 163 * 1024), (89, 99 * 1024), (90, 227 * 1024)
LLAMA = LayerShape(num_kv_heads=8, group_size=4, key_size=128, value_size=128, itemsize=2)
GEMMA = LayerShape(num_kv_heads=8, group_size=2, key_size=256, value_size=256, itemsize=2)
QWEN = LayerShape(num_kv_heads=2, group_size=7, key_size=64, value_size=64, itemsize=2)
EXACT = LayerShape(num_kv_heads=8, group_size=4, key_size=64, value_size=64, itemsize=4)
ALL_SCORES = {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_SINKS": True}
PLAIN = dict.fromkeys([*ALL_SCORES, "HAS_SCALES", "IS_FLOAT8"], False)

_INTEGERS = {
    "size", "window", "num_chunks", "num_pieces", "num_split_tiles", "num_parts", "min_part_keys", "table_stride",
    "query_stride", "query_head_stride", "key_stride", "key_head_stride", "value_stride", "value_head_stride",
    "num_rows", "out_size", "in_sixteenths", "part_units", "first_panel",
}  # fmt: skip
_POINTERS = {
    "key_scales": "*fp32",
    "value_scales": "*fp32",
    "parts": "*fp32",
    "part_sums": "*fp32",
    "sums": "*fp32",
    "chunks": "*i32",
    "pieces": "*i32",
    "split_tiles": "*i32",
    "tables": "*i32",
    "tiles": "*i32",
    "slots": "*i64",
    "order": "*i64",
    "starts": "*i64",
    "token_ids": "*i64",
}


def compiled_as(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """Compile a kernel whose arguments have the types of `signature`. Pointers are multiples of 16 bytes."""
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature.values()) if type_[0] == "*"},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})


def compiled(
    kernel: Any,
    shape: LayerShape,
    capability: int,
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    has_bytes: bool = False,
    pointers: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Compile like a launch: pointers are multiples of 16 bytes, and nothing is known of the integers.

    With `has_bytes` the cache holds bytes. `pointers` are types of arguments that other kernels have otherwise.
    """
    numbers = "*bf16" if shape.itemsize == 2 else "*fp32"
    cached = dict.fromkeys(("cached_keys", "cached_values"), "*i8" if has_bytes else numbers)
    scalars = {"scale": "fp32", "softcap": "fp32", "epsilon": "fp32", **dict.fromkeys(_INTEGERS, "i32")}
    signature = {
        name: "constexpr"
        if name in constants
        else scalars.get(name) or (_POINTERS | cached | pointers).get(name, numbers)
        for name in kernel.arg_names
    }
    return compiled_as(kernel, signature, constants, capability, num_warps, num_stages)


def sizes(shape: LayerShape) -> dict[str, int]:
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "KEY_SIZE": shape.key_size,
        "VALUE_SIZE": shape.value_size,
        "KEY_WIDTH": shape.key_width,
        "VALUE_WIDTH": shape.value_width,
    }


def widths(shape: LayerShape) -> dict[str, int]:
    return {**sizes(shape), "REST_WIDTH": shape.rest_width, "HEADS_PER_KEY": shape.heads_per_key}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "device", "is_decode", "is_split", "scores"),
    [
        (LLAMA, HOPPER, True, True, PLAIN),
        (LLAMA, HOPPER, False, False, PLAIN),
        (LLAMA, ADA, False, True, ALL_SCORES),
        (GEMMA, HOPPER, False, False, ALL_SCORES),
        (GEMMA, ADA, True, False, PLAIN),
        (QWEN, AMPERE, True, False, ALL_SCORES),
        (EXACT, HOPPER, True, True, PLAIN),
        (EXACT, HOPPER, False, False, PLAIN),
    ],
)
def test_attention_compiles_and_fits(
    shape: LayerShape, device: tuple[int, int], is_decode: bool, is_split: bool, scores: dict[str, bool]
) -> None:
    tile = choose_tile(shape, is_decode, device[0])
    constants = {
        **widths(shape), **PLAIN, **scores, "GROUP_SIZE": shape.group_size, "BLOCK_SIZE": 16, "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys, "IS_SPLIT": is_split, "STRIDE_ALIGNMENT": 16,
    }  # fmt: skip
    capability, shared_memory = device
    kernel = compiled(attend_kernel, shape, capability, constants, tile.num_warps, tile.num_stages)
    assert kernel.metadata.shared <= shared_memory
    # Copies of 16 bytes that go on while the tile before is computed.
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    if is_decode:
        waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.asm["ptx"])
        assert max(map(int, waits)) > 0, "every copy is waited for as soon as it has begun"


WRITE = {
    "BLOCK_SIZE": 16, "TILE_ROWS": 64, "HAS_VALUES": True, "HAS_SCALES": False, "IS_FLOAT8": False,
    "STRIDE_ALIGNMENT": 16,
}  # fmt: skip


def test_the_other_kernels_compile() -> None:
    write = compiled(write_kernel, QWEN, 90, {**sizes(QWEN), **WRITE}).asm["ptx"]
    assert "ld.global.v4" in write and not re.search(r"(ld|st)\.global[.\w]*\.b16", write)
    for bits in ({"HAS_SCALES": True}, {"HAS_SCALES": True, "IS_FLOAT8": True}):
        write = compiled(write_kernel, QWEN, 80, {**sizes(QWEN), **WRITE, **bits}, has_bytes=True).asm["ptx"]
        assert "ld.global.v4" in write and not re.search(r"ld\.global[.\w]*\.b(8|16)\b", write)
    constants = {**sizes(QWEN), "GROUP_SIZE": 7, "MOST_PARTS": MAX_PARTS, "HAS_SINKS": True}
    del constants["KEY_SIZE"], constants["KEY_WIDTH"]
    assert compiled(combine_kernel, QWEN, 90, constants).asm["ptx"]
    for is_fixed in (False, True):
        planned = {
            "TILE_TOKENS": 32, "TILE_KEYS": 64, "NUM_LANES": 128, "MOST_PARTS": MAX_PARTS, "HAS_WINDOW": True,
            "IS_FIXED": is_fixed,
        }  # fmt: skip
        assert compiled(plan_kernel, QWEN, 80, planned).asm["ptx"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [LLAMA, EXACT])
def test_the_kernels_of_a_layers_small_operations_compile(shape: LayerShape) -> None:
    heads = {"NUM_QUERY_HEADS": 32, "NUM_KV_HEADS": 8, "SIZE": 128, "HALF_WIDTH": 64, "TILE_HEADS": 8}
    for is_special in (False, True):
        normalize = {"SIZE": 4096, "WIDTH": 4096, "HAS_UPDATE": is_special, "IS_ROUNDED": False}
        assert compiled(add_and_normalize_kernel, shape, 90, normalize, num_warps=8).asm["ptx"]
        assert compiled(rotary_embedding_kernel, shape, 90, {**heads, "HAS_NORMS": is_special}).asm["ptx"]
    assert compiled(silu_and_mul_kernel, shape, 90, {"SIZE": 14336, "TILE": 1024}).asm["ptx"]
    embed = compiled(embed_kernel, shape, 90, {"SIZE": 4096, "TILE": 1024}).asm["ptx"]
    assert "ld.global.v4" in embed and "st.global.v4" in embed
