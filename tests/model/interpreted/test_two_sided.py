"""Two-sided attention in Triton's kernel against attention by definition, and models that run on it."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionCall
from replicas.model.attention.select import check_two_sided, choose_two_sided
from replicas.model.attention.two_sided import TwoSidedAttention
from replicas.model.attention.two_sided_triton import TritonTwoSided
from replicas.model.hardware.device import compute_capability
from replicas.model.loading.options import RunnerOptions
from testkit.model.engine_runs import load, random_prompts
from testkit.model.paged_cases import TOLERANCES
from testkit.model.pooling_checkpoints import PoolingFiles, expected_vectors, write_encoder
from testkit.model.two_sided_cases import TwoSidedCase
from tests.model.pooling.test_two_sided import CASES, outputs

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
KERNEL = TritonTwoSided(compute_capability(CPU))


def check(case: TwoSidedCase) -> None:
    assert case.largest_error(KERNEL, CPU) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 70), (33, 130, 2)])
def test_equals_attention_by_definition(lengths: tuple[int, ...]) -> None:
    check(TwoSidedCase(lengths))


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 24},
        {"window": 1},
        {"window": 300},
        {"heads": (3, 3)},
        {"heads": (14, 2), "window": 40},
        {"heads": (40, 1)},
        {"sizes": (24, 8)},
        {"sizes": (80, 80), "heads": (2, 1)},
        {"dtype": torch.float16, "window": 9},
    ],
    ids=str,
)
def test_every_kind_of_layer(changes: dict[str, object]) -> None:
    check(replace(TwoSidedCase((70, 1, 38)), **changes))  # type: ignore[arg-type]


@pytest.mark.usefixtures("bfloat16")
def test_a_model_in_bfloat16() -> None:
    check(TwoSidedCase((5, 40), window=24, dtype=torch.bfloat16))


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.tuples(st.integers(1, 5), st.integers(1, 3)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.none() | st.integers(1, 100),
)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
def test_any_shape(lengths: list[int], groups: tuple[int, int], sizes: tuple[int, int], window: int | None) -> None:
    check(TwoSidedCase(tuple(lengths), (groups[0] * groups[1], groups[1]), sizes, window))


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    case = TwoSidedCase((70, 41, 33), window=24)
    rows = case.outputs(KERNEL, CPU)
    for index, length in enumerate(case.lengths):
        assert torch.equal(case.outputs(KERNEL, CPU, (index,))[0], rows[index]), length


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["bert", "modernbert", "gemma3_text"])
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path, texts = write_encoder(tmp_path, family, CASES[family]), random_prompts((5, 40, 1))
    found = outputs(load(path), texts, RunnerOptions(attention_backend="triton"))
    torch.testing.assert_close(found, expected_vectors(path, texts, CASES[family]), atol=1e-5, rtol=0)


class WithoutWindows(TwoSidedAttention):
    """Attention that forgets the windows of layers."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return super().attend(replace(call, window=None))


def test_only_right_kernels_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(write_encoder(tmp_path, "modernbert", PoolingFiles("mean")))
    spec = replace(loaded.attention_spec(16), layers=loaded.two_sided_layers)
    assert {layer.window is None for layer in spec.layers} == {True, False}
    assert isinstance(choose_two_sided(spec, "triton"), TritonTwoSided)
    fault = check_two_sided(spec, WithoutWindows)
    assert fault is not None and "differs from plain torch" in fault
    monkeypatch.setattr("replicas.model.attention.two_sided_triton.two_sided_kernel", {})
    with pytest.raises(ModelLoadError, match="attention_backend is 'triton', which does not work here"):
        choose_two_sided(spec, "triton")
