"""The parallel compile of `make gpu-check` compiles every kernel that later groups launch."""

import os
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from bench.gpu.kernel_checks import ALL, BFLOAT16, COMPILED, FEW_PROCESSORS, LAYERS, MANY_PROCESSORS
from replicas.model.attention import triton
from replicas.model.attention.triton import TritonBackend
from testkit.model.kernel_keys import Key, note_launches
from testkit.model.paged_cases import Case, Chunks, attention_outputs

pytestmark = pytest.mark.rotated

QUICK = ("llama-3.2-1b", "gpt-oss-20b")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels of the interpreter have no keys")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.deep) for name in LAYERS]
)
def test_later_groups_launch_what_the_parallel_compile_has_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layer = replace(LAYERS[name], dtype=BFLOAT16)
    compiled, launched = (keys_of(monkeypatch, layer, mixtures) for mixtures in (COMPILED, ALL))
    assert {key[0] for key in launched} >= {"plan_kernel", "attend_kernel", "combine_kernel", "write_kernel"}
    assert launched == compiled


def keys_of(monkeypatch: pytest.MonkeyPatch, layer: Case, mixtures: dict[str, Chunks]) -> set[Key]:
    """Return the keys of the kernels that a layer launches on a GPU of capability 9.0."""
    with monkeypatch.context() as context:
        keys = note_launches(context, triton)
        for chunks in mixtures.values():
            for num_processors in (FEW_PROCESSORS, MANY_PROCESSORS):
                attention_outputs(layer.of(chunks), TritonBackend(num_processors, 90), torch.device("cpu"))
    return keys
