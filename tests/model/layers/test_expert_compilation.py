"""The kernel of experts fits every device, without spills, and reads weights in wide loads. No device is needed."""

import re
from dataclasses import dataclass
from itertools import product

import pytest

pytest.importorskip("triton")

import triton

from replicas.model.layers.panels import PanelFormat, unit_bytes
from replicas.model.layers.triton_experts import choose_expert_tile
from replicas.model.layers.triton_kernels import expert_linear_kernel
from replicas.model.layers.triton_panel_kernels import panel_expert_kernel
from replicas.model.layers.triton_panels import expert_tile
from tests.model.attention.test_compile_matrix import DEVICES, Resources, resources
from tests.model.attention.test_triton_compilation import EXACT, LLAMA, compiled, not_interpreted
from tests.model.layers.test_panel_compilation import INSTRUCTION

pytestmark = not_interpreted


@dataclass(frozen=True)
class Mixture:
    """Sizes of a served mixture."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    is_transposed: bool = False


MIXTURES = {
    "mixtral-8x7b": Mixture(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Mixture(128, 8, 2048, 768),
    "olmoe-1b-7b": Mixture(64, 8, 2048, 1024),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, is_transposed=True),
    "deepseek-v2-lite": Mixture(64, 6, 2048, 1408),
    "deepseek-v3": Mixture(256, 8, 7168, 2048),
}
NUM_TOKENS = {"decode": 64, "prefill": 8192}
QUICK = {("gpt-oss-20b", "decode", "first", 90), ("qwen3-30b-a3b", "prefill", "second", 80)}
MATRIX = [
    (name, kind, layer, capability)
    for name in MIXTURES
    for kind in NUM_TOKENS
    for layer in ("first", "second")
    for capability in DEVICES
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "kind", "layer", "capability"),
    [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep) for cell in MATRIX],
)
def test_the_kernel_fits_the_device(name: str, kind: str, layer: str, capability: int) -> None:
    mixture, device = MIXTURES[name], DEVICES[capability]
    taken, ptx = compile_for(mixture, NUM_TOKENS[kind], layer == "first", capability, itemsize=2)
    assert taken.shared <= device.shared_kib * 1024
    assert taken.stack <= (0 if capability in (90, 100) else device.max_stack)
    assert taken.num_programs(device) >= 2
    if kind == "prefill" and capability == 90:
        assert "wgmma" in ptx
    assert "cp.async.cg.shared.global" in ptx
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)
    assert max(map(int, waits)) > 0, "every copy is waited for as soon as it has begun"


@pytest.mark.deep
@pytest.mark.parametrize("kind", NUM_TOKENS)
@pytest.mark.parametrize("capability", DEVICES)
def test_the_exact_kernel_compiles(kind: str, capability: int) -> None:
    taken, _ = compile_for(MIXTURES["gpt-oss-20b"], NUM_TOKENS[kind], True, capability, itemsize=4)
    assert taken.shared <= DEVICES[capability].shared_kib * 1024


KEPT = {
    "MXFP4": ("gpt-oss-20b", PanelFormat.FLOAT4, 32, "*bf16"),
    "FP8 blocks": ("qwen3-30b-a3b", PanelFormat.FLOAT8, 128, "*fp32"),
    "int4": ("deepseek-v2-lite", PanelFormat.INT4, 128, "*fp16"),
}
QUICK_KEPT = {("MXFP4", "decode", 90), ("FP8 blocks", "prefill", 80)}


@pytest.mark.parametrize(
    ("name", "kind", "capability"),
    [
        cell if cell in QUICK_KEPT else pytest.param(*cell, marks=pytest.mark.deep)
        for cell in product(KEPT, NUM_TOKENS, DEVICES)
    ],
)
def test_the_kernel_of_kept_experts_fits_the_device(name: str, kind: str, capability: int) -> None:
    mixture_name, panel_format, group, scales = KEPT[name]
    mixture, device = MIXTURES[mixture_name], DEVICES[capability]
    tile = expert_tile(NUM_TOKENS[kind] * mixture.top_k, mixture.num_experts, itemsize=2)
    constants = {
        "IN_SIZE": mixture.hidden, "OUT_SIZE": 2 * mixture.inner, "NUM_GROUPS": mixture.hidden // group,
        "NUM_EXPERTS": mixture.num_experts, "EXPERT_WIDTH": triton.next_power_of_2(mixture.num_experts),
        "TOP_K": mixture.top_k, "IS_FIRST": True, "FORMAT": panel_format.value, "BYTES": unit_bytes(group),
        "GROUP": group, "MIDDLE": 8 if panel_format is PanelFormat.INT4 else 0, "HAS_ZERO_POINTS": False,
        "HAS_BIAS": mixture.is_transposed, "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns,
    }  # fmt: skip
    pointers = {"numbers": "*u8", "scales": scales, "zero_points": "*bf16", "table": "*bf16"}
    kernel = compiled(
        panel_expert_kernel, LLAMA, capability, constants, tile.num_warps, tile.num_stages, pointers=pointers
    )
    taken, ptx = resources(kernel), kernel.asm["ptx"]
    assert taken.shared <= device.shared_kib * 1024
    assert taken.stack == 0
    assert taken.num_programs(device) >= (2 if kind == "decode" else 1)
    assert INSTRUCTION[capability] in ptx
    assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))) > 0, "copies are waited for at once"


def compile_for(
    mixture: Mixture, num_tokens: int, is_first: bool, capability: int, itemsize: int
) -> tuple[Resources, str]:
    tile = choose_expert_tile(num_tokens * mixture.top_k, mixture.num_experts, itemsize)
    constants = {
        "IN_SIZE": mixture.hidden if is_first else mixture.inner,
        "OUT_SIZE": 2 * mixture.inner if is_first else mixture.hidden,
        "NUM_EXPERTS": mixture.num_experts,
        "EXPERT_WIDTH": triton.next_power_of_2(mixture.num_experts),
        "TOP_K": mixture.top_k,
        "IS_TRANSPOSED": mixture.is_transposed,
        "IS_FIRST": is_first,
        "HAS_BIAS": mixture.is_transposed,
        "TILE_ROWS": tile.rows,
        "TILE_COLUMNS": tile.columns,
        "TILE_INNER": tile.inner,
    }
    shape = LLAMA if itemsize == 2 else EXACT
    kernel = compiled(expert_linear_kernel, shape, capability, constants, tile.num_warps, tile.num_stages)
    return resources(kernel), kernel.asm["ptx"]
