"""The batch-invariant kernels fit every device, without spills, and read in wide loads. No device is needed."""

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from replicas.model.attention.triton import LayerShape
from replicas.model.layers.invariant_tiles import divide
from replicas.model.layers.triton_kernels import add_parts_kernel, linear_kernel, row_sum_kernel
from tests.model.attention.test_compile_matrix import DEVICES, resources
from tests.model.attention.test_triton_compilation import EXACT, LLAMA, compiled, not_interpreted

pytestmark = not_interpreted

# Inputs and outputs of a layer, and whether the weight is that of a linear layer of torch, as all but GPT-2's are.
SIZES = {
    "llama-3.1-8b gate and up": (4096, 28_672, True),
    "llama-3.1-8b down": (14_336, 4096, True),
    "llama-3.2-1b head": (2048, 128_256, True),
    "qwen2.5-0.5b down": (4864, 896, True),
    "smollm2-135m query, key and value": (576, 960, True),
    "gpt2 inner": (768, 3072, False),
}
ROWS = (1, 16, 17, 64, 65, 2048)
"""Numbers of rows on both sides of each change of tiles."""
QUICK = {("llama-3.1-8b gate and up", 90)}
MATRIX = [(name, capability) for name in SIZES for capability in DEVICES]


INSTRUCTION = re.compile(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[.\w:]+")


def product(name: str, capability: int, num_rows: int, shape: LayerShape = LLAMA) -> Any:
    """Compile the kernel as `multiply_rows` launches it."""
    in_size, out_size, is_transposed = SIZES[name]
    division = divide(capability, in_size, out_size, shape.itemsize, num_rows)
    tile = division.tile
    constants = {
        "IN_SIZE": in_size, "OUT_SIZE": out_size, "IS_TRANSPOSED": is_transposed, "HAS_BIAS": not is_transposed,
        "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_INNER": tile.inner,
        "NUM_PARTS": division.num_parts, "PART_SIZE": division.part_size, "IS_SPLIT": division.is_split,
    }  # fmt: skip
    pointers = {"output": "*fp32"} if division.is_split else {}
    return compiled(linear_kernel, shape, capability, constants, tile.num_warps, tile.num_stages, pointers=pointers)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "capability"), [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep) for cell in MATRIX]
)
def test_the_kernel_of_products_fits_the_device(name: str, capability: int) -> None:
    device, is_transposed = DEVICES[capability], SIZES[name][2]
    for num_rows in ROWS:
        kernel = product(name, capability, num_rows)
        taken, ptx = resources(kernel), kernel.asm["ptx"]
        assert taken.shared <= device.shared_kib * 1024 and taken.stack == 0
        assert taken.num_programs(device) >= (1 if num_rows > 64 else 2)
        assert "cp.async.cg.shared.global" in ptx
        assert not re.search(r"ld\.global[.\w]*\.b16", ptx) or not is_transposed


@pytest.mark.deep
@pytest.mark.parametrize("capability", DEVICES)
def test_exact_products_fit_the_device(capability: int) -> None:
    kernel = product("llama-3.2-1b head", capability, 64, EXACT)
    assert resources(kernel).shared <= DEVICES[capability].shared_kib * 1024


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        (name, capability)
        if (name, capability) in (("llama-3.1-8b down", 80), ("llama-3.1-8b down", 90), ("llama-3.1-8b down", 120))
        else pytest.param(name, capability, marks=pytest.mark.deep)
        for name, capability in MATRIX
    ],
)
def test_all_tiles_use_one_matrix_instruction_and_one_step(name: str, capability: int) -> None:
    """The bits of a row do not change where the number of rows changes the tile."""
    divisions = [divide(capability, *SIZES[name][:2], 2, num_rows) for num_rows in ROWS]
    assert len({(one.tile.inner, one.part_size, one.num_parts, one.tile.columns) for one in divisions}) == 1
    instructions = [set(INSTRUCTION.findall(product(name, capability, num_rows).asm["ptx"])) for num_rows in ROWS]
    assert len(set.union(*instructions)) == 1, instructions
    if capability == 100:  # The instruction takes its rows from a descriptor.
        assert len({one.tile.rows for one in divisions}) == 1


@pytest.mark.parametrize("capability", DEVICES)
def test_products_fill_the_processors_in_bounded_memory(capability: int) -> None:
    for in_size, out_size, _ in SIZES.values():
        for num_rows in (*range(1, 300, 7), 511, 2048, 8192):
            one = divide(capability, in_size, out_size, 2, num_rows)
            assert one.part_size % one.tile.inner == 0 and (one.num_parts - 1) * one.part_size < in_size
            assert one.num_parts * one.part_size >= in_size
            if one.is_split:
                assert 4 * one.num_parts * num_rows * out_size <= 2**25
            if num_rows == 1 and in_size >= 4096:
                assert one.num_parts * -(-out_size // one.tile.columns) >= 112


@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.deep) for other in (80, 100, 120))])
def test_the_kernel_that_adds_parts_compiles(capability: int) -> None:
    constants = {"OUT_SIZE": 4096, "NUM_PARTS": 8, "HAS_BIAS": True, "TILE": 1024}
    kernel = compiled(add_parts_kernel, LLAMA, capability, constants)
    assert resources(kernel).stack == 0 and "ld.global.v4" in kernel.asm["ptx"]


@pytest.mark.deep
@pytest.mark.parametrize("capability", DEVICES)
def test_the_kernel_of_sums_compiles(capability: int) -> None:
    taken = resources(compiled(row_sum_kernel, LLAMA, capability, {"TILE": 1024}))
    assert taken.stack == 0 and taken.num_programs(DEVICES[capability]) >= 2
