"""The sampler's kernels compile for every device without spills. No device is needed."""

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replicas.model.sampling.token_counts import IN_PROMPT
from replicas.model.sampling.triton_bracket_kernels import bracket_kernel, count_kernel, gather_kernel, settle_kernel
from replicas.model.sampling.triton_kernels import (
    draw_kernel,
    full_kernel,
    mask_kernel,
    mass_kernel,
    peak_kernel,
    penalize_kernel,
    score_kernel,
)
from tests.model.attention.test_compile_matrix import DEVICES, resources
from tests.model.attention.test_triton_compilation import not_interpreted

pytestmark = not_interpreted

TYPES = {
    "logits": "*fp32", "rows": "*i64", "slots": "*i64", "penalties": "*fp64", "counts": "*i32", "columns": "*fp64",
    "tokens": "*i64", "peaks": "*i64", "brackets": "*i32", "sums": "*i64", "listed_values": "*fp32",
    "listed_ids": "*i32", "scale": "fp32", "bits": "*u8", "masses": "*i64",
    "best": "*i64", "log_sums": "*fp32",
}  # fmt: skip
BRACKETS = {"TILE_ROWS": 1, "NUM_BUCKETS": 4096}
LISTS = {**BRACKETS, "CAPACITY": 4096, "WHOLE": 2.0**44}
PARTS = {"TILE": 1024, "NUM_PARTS": 128, "WHOLE": 2.0**44}
ALONE = {"count", "settle"}
"""Kernels that hold so many numbers in registers that a multiprocessor runs one program at a time."""
KERNELS = {
    "count": (count_kernel, {"TILE": 1024, "NUM_BUCKETS": 4096}, 8),
    "bracket": (bracket_kernel, BRACKETS, 8),
    "gather": (gather_kernel, {"TILE": 1024, **LISTS}, 8),
    "settle": (settle_kernel, LISTS, 8),
    "penalize": (penalize_kernel, {"TILE": 1024, "IN_PROMPT": IN_PROMPT}, 4),
    "mask": (mask_kernel, {"TILE": 1024}, 4),
    "mass": (mass_kernel, PARTS, 4),
    "full": (full_kernel, PARTS, 4),
    "peak": (peak_kernel, {"TILE": 1024}, 4),
    "score": (score_kernel, {"TILE": 1024, "NUM_TOP": 8}, 4),
    "draw": (draw_kernel, {"TILE_ROWS": 1, "TILE": 2048, "WHOLE": 2.0**44}, 8),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        (name, capability)
        if capability == 90 and name != "draw"
        else pytest.param(name, capability, marks=pytest.mark.deep)
        for name in KERNELS
        for capability in DEVICES
    ],
)
def test_a_kernel_compiles(name: str, capability: int) -> None:
    kernel, constants, num_warps = KERNELS[name]
    signature = {
        argument: "constexpr" if argument in constants else TYPES.get(argument, "i32") for argument in kernel.arg_names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature.values()) if type_[0] == "*"},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    taken = resources(made)
    assert taken.stack == 0 and taken.num_programs(DEVICES[capability]) >= (1 if name in ALONE else 2)
