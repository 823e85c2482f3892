"""Two-sided attention on a CPU, of plain torch and compiled, against attention by definition."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppTwoSidedAttention
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.select import choose_two_sided
from replicas.model.attention.two_sided import TwoSidedAttention
from testkit.model.compiled_kernels import with_threads
from testkit.model.engine_runs import load, load_compiled
from testkit.model.pooling_checkpoints import PoolingFiles, write_encoder
from testkit.model.two_sided_cases import TwoSidedCase

pytestmark = pytest.mark.usefixtures("kernels")

CPU = torch.device("cpu")
BACKENDS = [TwoSidedAttention, CppTwoSidedAttention]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def check(case: TwoSidedCase, backend: AttentionBackend = CppTwoSidedAttention) -> None:
    assert case.largest_error(backend, CPU) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [None, 1, 24, 300])
@pytest.mark.parametrize(("heads", "sizes"), [((4, 4), (32, 32)), ((14, 2), (80, 80)), ((3, 1), (24, 8))])
def test_equals_attention_by_definition(
    heads: tuple[int, int], sizes: tuple[int, int], window: int | None, dtype: torch.dtype, backend: AttentionBackend
) -> None:
    check(TwoSidedCase((70, 1, 38, 130), heads, sizes, window, dtype), backend)


@given(
    st.lists(st.integers(1, 140), min_size=1, max_size=4),
    st.tuples(st.integers(1, 5), st.integers(1, 3)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.none() | st.integers(1, 150),
    st.sampled_from(list(TOLERANCES)),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_any_shape(
    lengths: list[int],
    groups: tuple[int, int],
    sizes: tuple[int, int],
    window: int | None,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    with with_threads(num_threads):
        check(TwoSidedCase(tuple(lengths), (groups[0] * groups[1], groups[1]), sizes, window, dtype))


def test_a_text_depends_neither_on_its_neighbours_nor_on_the_threads() -> None:
    case = TwoSidedCase((170, 41, 33), window=24)
    rows = case.outputs(CppTwoSidedAttention, CPU)
    for num_threads in (1, 2, 7):
        for index, length in enumerate(case.lengths):
            with with_threads(num_threads):
                assert torch.equal(case.outputs(CppTwoSidedAttention, CPU, (index,))[0], rows[index]), length


def test_the_compiled_kernel_is_chosen_where_there_are_kernels(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "modernbert", PoolingFiles("mean"))
    for loaded, fastest in ((load(path), TwoSidedAttention), (load_compiled(path), CppTwoSidedAttention)):
        spec = replace(loaded.attention_spec(16), layers=loaded.two_sided_layers)
        assert choose_two_sided(spec, "auto") is fastest
        assert choose_two_sided(spec, "gather") is TwoSidedAttention
        with pytest.raises(ModelLoadError, match="attention_backend is 'flash', which has no two-sided attention"):
            choose_two_sided(spec, "flash")
