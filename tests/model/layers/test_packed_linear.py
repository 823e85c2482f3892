"""Packed linear layers give what plain ones give, and hold each weight once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.model.layers.linear import choose_linears, join_linears, plain_linear, replace_linears
from replicas.model.layers.packed_linear import PackedLinear, can_pack

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [dtype for dtype in TOLERANCES if can_pack(dtype)]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (192, 48), (33, 70), (1, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_gives_what_plain_gives(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    weight = numbers(*shape, dtype=dtype)
    bias = numbers(shape[0], dtype=dtype, seed=1) if has_bias else None
    packed = PackedLinear(weight, bias)
    for num_rows in (0, 1, 3, 33, 200):
        inputs = numbers(1, num_rows, shape[1], dtype=dtype, seed=2)
        exact = functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(packed(inputs).double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_can_be_asked_for(dtype: torch.dtype) -> None:
    weight = numbers(33, 70, dtype=dtype)
    assert torch.equal(PackedLinear(weight, None).weight, weight)


def test_a_format_that_cannot_be_packed_is_left_plain() -> None:
    assert not can_pack(torch.float16)
    assert choose_linears(torch.float16, False, "none") is plain_linear


def test_joined_layers_give_their_outputs_side_by_side() -> None:
    parts = [nn.Linear(12, size) for size in (5, 7, 2)]
    inputs = torch.randn(3, 12)
    joined = join_linears(parts, plain_linear)
    torch.testing.assert_close(joined(inputs), torch.cat([part(inputs) for part in parts], dim=1))


def test_a_tied_head_is_replaced_and_the_embedding_stays() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "inner": nn.Linear(8, 8), "head": nn.Linear(8, 20)})
    model["head"].weight = model["embedding"].weight
    embedding = model["embedding"].weight
    replace_linears(model, PackedLinear)
    assert [type(module) for module in model.values()] == [nn.Embedding, PackedLinear, PackedLinear]
    assert model["embedding"].weight is embedding and torch.equal(model["head"].weight, embedding)
