"""The embedding kernel copies rows of its table, reads nothing outside it, and marks an id outside with NaN."""

import random

import pytest

pytest.importorskip("triton")

import torch

from replicas.model.layers.triton_ops import TritonLayerOps

OUTSIDE = (-1, -(2**40), 2**31, 2**40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 96, 1100])
def test_an_id_outside_gives_nan_and_no_read_outside(dtype: torch.dtype, size: int) -> None:
    rng, generator = random.Random(size), torch.Generator().manual_seed(size)
    # The table lies between rows that no output may show. Ids far outside would end the process if they were read.
    memory = torch.full((30, size), 7.0, dtype=dtype)
    table = memory[10:20]
    table.copy_(torch.randn(10, size, generator=generator))
    token_ids = [rng.choice([*range(10), 10, 19, *OUTSIDE]) for _ in range(64)]
    output = TritonLayerOps().embed(torch.tensor(token_ids), table)
    for token_id, row in zip(token_ids, output, strict=True):
        assert torch.equal(row, table[token_id]) if 0 <= token_id < 10 else bool(row.isnan().all())


def test_no_token_gives_no_row() -> None:
    assert TritonLayerOps().embed(torch.empty(0, dtype=torch.int64), torch.ones(3, 4)).shape == (0, 4)
