"""Kernels of weights in panels fit every device without spills, with its matrix instruction. No device is needed."""

import re
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton")

from replicas.model.attention.triton import LayerShape
from replicas.model.layers.panels import WHOLE, PanelFormat, unit_bytes
from replicas.model.layers.triton_kernels import add_and_normalize_kernel
from replicas.model.layers.triton_panel_kernels import panel_linear_kernel, round_rows_kernel, widen_kernel
from replicas.model.layers.triton_panels import INVARIANT_TILE, most_rows, panel_tile, row_division
from tests.model.attention.test_compile_matrix import DEVICES, resources
from tests.model.attention.test_triton_compilation import EXACT, LLAMA, compiled, not_interpreted

pytestmark = not_interpreted


@dataclass(frozen=True)
class Form:
    """Form of a weight of 4,096 inputs."""

    format: PanelFormat
    group: int
    scales: str = "*fp16"
    zero_points: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of an output in a unit."""
        return unit_bytes(self.group)


FORMS = {
    "awq": Form(PanelFormat.INT4, 128, zero_points="*u8"),
    "gptq, symmetric": Form(PanelFormat.INT4, 128),
    "4 bits, groups of 32": Form(PanelFormat.INT4, 32, "*bf16"),
    "4 bits, groups of 64": Form(PanelFormat.INT4, 64, "*bf16"),
    "q4_k": Form(PanelFormat.INT4, 32, "*fp32", "*fp32"),
    "iq4": Form(PanelFormat.TABLE4, 32, "*fp32"),
    "fp4": Form(PanelFormat.FLOAT4, 32, "*bf16"),
    "nvfp4": Form(PanelFormat.FLOAT4, 16, "*fp32"),
    "int8": Form(PanelFormat.INT8, WHOLE, "*fp32"),
    "q8_0": Form(PanelFormat.INT8, 32, "*fp32"),
    "q6_k": Form(PanelFormat.INT8, 16, "*fp32"),
    "fp8 by row": Form(PanelFormat.FLOAT8, WHOLE, "*fp32"),
    "fp8 blocks": Form(PanelFormat.FLOAT8, 128, "*fp32"),
}
ROWS = (16, 32, 64, 256)
SPILLED = 8
"""Bytes of registers that a thread of the largest tile may lack on 12.0, with zero points that are floats."""
QUICK = {("awq", 80), ("gptq, symmetric", 90), ("fp8 by row", 90), ("fp8 blocks", 80), ("q8_0", 120)}
MATRIX = [
    cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.deep)
    for cell in ((name, capability) for name in FORMS for capability in DEVICES)
]
INSTRUCTION = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def product(
    form: Form, num_rows: int, capability: int, shape: LayerShape = LLAMA, *, is_invariant: bool = False
) -> Any:
    """Compile the kernel as `TritonPanels` launches it."""
    tile = INVARIANT_TILE if is_invariant else panel_tile(num_rows, shape.itemsize)
    is_split = num_rows <= 64 and not is_invariant
    constants = {
        "FORMAT": form.format.value, "BYTES": form.bytes, "GROUP": form.group, "HAS_ONE_GROUP": form.group == WHOLE,
        "MIDDLE": 8 if form.format is PanelFormat.INT4 else 0, "HAS_ZERO_POINTS": form.zero_points is not None,
        "HAS_BIAS": False, "IS_SPLIT": is_split, "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns,
    }  # fmt: skip
    output = {"output": "*fp32"} if is_split else {}
    return compiled(
        panel_linear_kernel, shape, capability, constants, tile.num_warps, tile.num_stages,
        pointers=pointers(form) | output,
    )  # fmt: skip


def pointers(form: Form) -> dict[str, str]:
    return {"numbers": "*u8", "scales": form.scales, "zero_points": form.zero_points or "*bf16", "table": "*bf16"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "capability"), MATRIX)
def test_the_kernel_fits_the_device(name: str, capability: int) -> None:
    form, device = FORMS[name], DEVICES[capability]
    for num_rows in (number for number in ROWS if number <= most_rows(form.format, form.bytes)):
        kernel = product(form, num_rows, capability)
        taken, ptx = resources(kernel), kernel.asm["ptx"]
        assert taken.shared <= device.shared_kib * 1024, num_rows
        assert taken.stack <= (SPILLED if num_rows > 64 and capability == 120 else 0), num_rows
        assert taken.num_programs(device) >= (1 if num_rows > 64 else 2), num_rows
        assert INSTRUCTION[capability] in ptx
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", ptx)
        assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))) > 0, "copies are waited for at once"


OTHERS = [pytest.param(capability, marks=pytest.mark.deep) for capability in DEVICES if capability != 90]


@pytest.mark.parametrize("capability", [90, *OTHERS])
def test_batch_invariant_and_exact_products_and_the_widening_fit(capability: int) -> None:
    device = DEVICES[capability]
    for form in (FORMS["awq"], FORMS["fp8 by row"]):
        for kernel in (product(form, 1, capability, is_invariant=True), product(form, 64, capability, EXACT)):
            assert resources(kernel).shared <= device.shared_kib * 1024
        constants = {
            "FORMAT": form.format.value, "BYTES": form.bytes, "GROUP": form.group, "MIDDLE": 0,
            "HAS_ZERO_POINTS": form.zero_points is not None,
        }  # fmt: skip
        kernel = compiled(widen_kernel, LLAMA, capability, constants, pointers=pointers(form))
        assert resources(kernel).stack == 0 and "st.global.v4" in kernel.asm["ptx"]


@pytest.mark.parametrize("capability", [90, *OTHERS])
@pytest.mark.parametrize("size", [4096, 28_672])
def test_the_rounding_of_rows_keeps_a_row_in_registers(capability: int, size: int) -> None:
    width, num_warps = row_division(size)
    pointers = {"rows": "*bf16", "numbers": "*u8", "scales": "*fp32"}
    kernel = compiled(
        round_rows_kernel, LLAMA, capability, {"SIZE": size, "WIDTH": width}, num_warps, pointers=pointers
    )
    assert resources(kernel).stack == 0
    assert "ld.global.v4" in kernel.asm["ptx"]


@pytest.mark.parametrize("capability", [90, *OTHERS])
def test_a_norm_keeps_the_row_that_it_rounds_in_registers(capability: int) -> None:
    constants = {"SIZE": 4096, "WIDTH": 4096, "HAS_UPDATE": True, "IS_ROUNDED": True}
    pointers = {"output": "*u8", "scales": "*fp32"}
    kernel = compiled(add_and_normalize_kernel, LLAMA, capability, constants, num_warps=8, pointers=pointers)
    assert resources(kernel).stack == 0
    assert "ld.global.v4" in kernel.asm["ptx"] and "st.global.v4" in kernel.asm["ptx"]
