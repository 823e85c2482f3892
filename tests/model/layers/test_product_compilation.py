"""The batch-invariant kernels fit every device, without spills, and read in wide loads. No device is needed."""

import re

import pytest

pytest.importorskip("triton")

from replicas.model.layers.triton_experts import batch_invariant_tile
from replicas.model.layers.triton_kernels import linear_kernel, row_sum_kernel
from tests.model.attention.test_compile_matrix import DEVICES, resources
from tests.model.attention.test_triton_compilation import EXACT, LLAMA, compiled, not_interpreted

pytestmark = not_interpreted

# Inputs and outputs of a layer, and whether the weight is that of a linear layer of torch, as all but GPT-2's are.
SIZES = {
    "llama-3.1-8b gate and up": (4096, 28_672, True),
    "llama-3.2-1b head": (2048, 128_256, True),
    "qwen2.5-0.5b down": (4864, 896, True),
    "smollm2-135m query, key and value": (576, 960, True),
    "gpt2 inner": (768, 3072, False),
}
QUICK = {("llama-3.1-8b gate and up", 90)}
MATRIX = [(name, capability) for name in SIZES for capability in DEVICES]


@pytest.mark.parametrize(
    ("name", "capability"), [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep) for cell in MATRIX]
)
def test_the_kernel_of_products_fits_the_device(name: str, capability: int) -> None:
    in_size, out_size, is_transposed = SIZES[name]
    device = DEVICES[capability]
    for shape in (LLAMA, EXACT) if name == "llama-3.2-1b head" else (LLAMA,):
        tile = batch_invariant_tile(shape.itemsize)
        constants = {
            "IN_SIZE": in_size, "OUT_SIZE": out_size, "IS_TRANSPOSED": is_transposed, "HAS_BIAS": not is_transposed,
            "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_INNER": tile.inner,
        }  # fmt: skip
        kernel = compiled(linear_kernel, shape, capability, constants, tile.num_warps, tile.num_stages)
        taken, ptx = resources(kernel), kernel.asm["ptx"]
        assert taken.shared <= device.shared_kib * 1024
        if shape is LLAMA:
            assert taken.stack == 0 and taken.num_programs(device) >= 2
            assert "cp.async.cg.shared.global" in ptx
            assert not re.search(r"ld\.global[.\w]*\.b16", ptx) or not is_transposed


@pytest.mark.deep
@pytest.mark.parametrize("capability", DEVICES)
def test_the_kernel_of_sums_compiles(capability: int) -> None:
    taken = resources(compiled(row_sum_kernel, LLAMA, capability, {"TILE": 1024}))
    assert taken.stack == 0 and taken.num_programs(DEVICES[capability]) >= 2
