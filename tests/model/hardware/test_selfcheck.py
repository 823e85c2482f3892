"""A candidate is refused for any fault: wrong numbers, NaN, another shape or dtype, or an exception."""

from collections.abc import Iterator

import pytest
import torch

from replicas.model.hardware.selfcheck import TOLERANCES, WHOLE_MODEL, find_fault, relative_error

EXPECTED = torch.randn(4, 7, 96, generator=torch.Generator().manual_seed(0))


def test_the_error_is_that_of_the_worst_row() -> None:
    found = EXPECTED.clone()
    found[2, 5] *= 1.25
    assert relative_error(found, EXPECTED) == pytest.approx(0.25)
    assert relative_error(EXPECTED, EXPECTED) == relative_error(EXPECTED[:0], EXPECTED[:0]) == 0.0


NAN = EXPECTED.masked_fill(EXPECTED[0, 0, 0] == EXPECTED, torch.nan)


@pytest.mark.parametrize(
    "other", [EXPECTED[:3], EXPECTED[:1], EXPECTED.double(), NAN], ids=["shape", "broadcast", "dtype", "NaN"]
)
def test_another_shape_or_dtype_or_a_nan_is_a_fault(other: torch.Tensor) -> None:
    assert find_fault([("it", relative_error(other, EXPECTED))], torch.float32) is not None


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_rounding_is_no_fault_and_a_wrong_number_is_one(dtype: torch.dtype) -> None:
    rounded = EXPECTED.to(dtype, copy=True).float()
    assert find_fault([("right", relative_error(rounded, EXPECTED))], dtype) is None
    rounded[3, 6, 95] += 1
    fault = find_fault([("right", 0.0), ("wrong", relative_error(rounded, EXPECTED))], dtype)
    assert fault is not None and fault.startswith("wrong")


def test_a_whole_model_may_differ_by_more() -> None:
    error = 1.5 * TOLERANCES[torch.bfloat16]
    assert find_fault([("it", error)], torch.bfloat16) is not None
    assert find_fault([("it", error)], torch.bfloat16, WHOLE_MODEL) is None


def test_an_exception_of_a_candidate_is_its_fault() -> None:
    def errors() -> Iterator[tuple[str, float]]:
        yield "right", 0.0
        raise OSError("no compiler")

    assert find_fault(errors(), torch.float32) == "OSError: no compiler"
