"""The kernel of two-sided attention fits every device, without spills, and reads keys ahead. No device is needed."""

import re

import pytest

pytest.importorskip("triton")

from replicas.model.attention.triton import LayerShape
from replicas.model.attention.two_sided_kernels import two_sided_kernel
from replicas.model.attention.two_sided_triton import choose_two_sided_tile
from tests.model.attention.test_compile_matrix import DEVICES, resources, shape
from tests.model.attention.test_triton_compilation import compiled, not_interpreted, sizes

pytestmark = not_interpreted

LAYERS = {
    "bert-base": (shape(12, 1, 64), False),
    "modernbert-local": (shape(12, 1, 64), True),
    "minilm": (shape(12, 1, 32), False),
    "embeddinggemma": (shape(1, 3, 256), False),
    "embeddinggemma-local": (shape(1, 3, 256), True),
    "heads of 128": (shape(8, 4, 128), True),
    "bert-base in float32": (LayerShape(12, 1, 64, 64, itemsize=4), True),
    "embeddinggemma in float32": (LayerShape(1, 3, 256, 256, itemsize=4), True),
}
QUICK = {("modernbert-local", 90), ("embeddinggemma-local", 80), ("bert-base", 120), ("embeddinggemma", 100)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep)
        for cell in ((name, capability) for name in LAYERS for capability in DEVICES)
    ],
)
def test_the_kernel_fits_the_device(name: str, capability: int) -> None:
    (layer, has_window), device = LAYERS[name], DEVICES[capability]
    tile = choose_two_sided_tile(layer, capability)
    constants = {
        **sizes(layer), "GROUP_SIZE": layer.group_size, "TILE_ROWS": tile.rows, "TILE_KEYS": tile.keys,
        "HAS_WINDOW": has_window, "STRIDE_ALIGNMENT": 16,
    }  # fmt: skip
    kernel = compiled(two_sided_kernel, layer, capability, constants, tile.num_warps, tile.num_stages)
    taken, ptx = resources(kernel), kernel.asm["ptx"]
    assert taken.shared <= device.shared_kib * 1024
    assert taken.stack == 0
    if capability == 90 and layer.itemsize == 2:
        assert "wgmma" in ptx
    assert not re.search(r"ld\.global[.\w]*\.b16", ptx)
    if tile.num_stages > 2:
        assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))) > 0, "copies are waited for at once"
