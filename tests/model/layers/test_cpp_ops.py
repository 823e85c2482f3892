"""The compiled operations of a layer against the same in plain torch."""

import pytest
import torch
from torch import Tensor

from replicas.model.layers.ops import CppLayerOps, HeadLayout, LayerOps, Norm, RotaryCosSin, TorchLayerOps

pytestmark = pytest.mark.usefixtures("kernels")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`expected` is computed in float32 from the same numbers."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (37, 576), (3, 7), (0, 64)])
def test_add_and_normalize(num_rows: int, size: int, dtype: torch.dtype) -> None:
    residual, update = (numbers(num_rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = numbers(size, dtype=dtype)
    plain = Norm(weight.float(), 1e-5)
    for added in (None, update):
        sums, expected_sums = residual.clone(), residual.float()
        if added is not None:
            expected_sums = (expected_sums + added.float()).to(dtype).float()
        found = CppLayerOps().add_and_normalize(sums, added, Norm(weight, 1e-5))
        assert_alike(found, TorchLayerOps().add_and_normalize(expected_sums, None, plain), dtype)
        assert torch.equal(sums.float(), expected_sums)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("size", "has_norms"), [(16, False), (64, True), (80, True), (6, False)])
def test_rotate(size: int, has_norms: bool, dtype: torch.dtype) -> None:
    rows = numbers(33, 7 * size, dtype=dtype)
    angles = numbers(33, size // 2, seed=1).repeat(1, 2)
    cos_sin = RotaryCosSin(angles.cos().to(dtype), angles.sin().to(dtype))
    norms = [Norm(numbers(size, dtype=dtype, seed=seed), 1e-6) if has_norms else None for seed in (2, 3)]
    expected = rows.float()
    TorchLayerOps().rotary_embedding(
        expected,
        HeadLayout(3, 2, size, *(norm and Norm(norm.weight.float(), norm.epsilon) for norm in norms)),
        RotaryCosSin(cos_sin.cos.float(), cos_sin.sin.float()),
    )
    CppLayerOps().rotary_embedding(rows, HeadLayout(3, 2, size, *norms), cos_sin)
    assert_alike(rows, expected, dtype)
    # Values stay as they are.
    assert torch.equal(rows[:, 5 * size :], numbers(33, 7 * size, dtype=dtype)[:, 5 * size :])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gate(dtype: torch.dtype) -> None:
    rows = torch.cat((numbers(50, 66, seed=1) * 30, numbers(50, 66, seed=2)), dim=1).to(dtype)
    assert_alike(CppLayerOps().silu_and_mul(rows), TorchLayerOps().silu_and_mul(rows.float()), dtype)


@pytest.mark.parametrize("ops", [TorchLayerOps(), CppLayerOps()], ids=["torch", "compiled"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_of_nan_stays_one_and_harms_no_other(ops: LayerOps, dtype: torch.dtype) -> None:
    def poisoned(rows: Tensor) -> Tensor:
        rows[1] = torch.nan
        return rows

    layout = HeadLayout(2, 1, 16, None, None)
    cos_sin = RotaryCosSin(numbers(3, 16, dtype=dtype), numbers(3, 16, dtype=dtype))
    rotated = poisoned(numbers(3, 64, dtype=dtype))
    ops.rotary_embedding(rotated, layout, cos_sin)
    normalized = ops.add_and_normalize(poisoned(numbers(3, 64, dtype=dtype)), None, Norm(numbers(64, dtype=dtype), 0.0))
    for result in (rotated, normalized, ops.silu_and_mul(poisoned(numbers(3, 64, dtype=dtype)))):
        assert result[1].isnan().all() and result[::2].isfinite().all()
