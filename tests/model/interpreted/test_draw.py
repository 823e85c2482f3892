"""The kernel that draws from the most probable tokens gives the tokens of the sorted definition."""

import math
import weakref
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.model.sampling import sampler, triton_draw
from replicas.model.sampling.multinomial import SamplingTensors, sample_full, sample_truncated
from replicas.model.sampling.triton_draw import (
    DrawSizes,
    check_draw,
    draw_full,
    draw_in_brackets,
    draw_truncated,
    most_probable,
)
from replicas.protocol import LogitBias, SamplingParams
from testkit.model.engine_runs import sample
from tests.model.sampling.test_sampler import sequence

pytestmark = pytest.mark.rotated

NUM_ROWS = 256
VOCAB_SIZE = 120
NUM_QUICK = 3


def random_logits(generator: torch.Generator, vocab_size: int, num_rows: int = NUM_ROWS) -> Tensor:
    """Return rows of every kind: smooth, in bfloat16, with ties, with both zeros, with forbidden tokens, flat."""
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.rand(num_rows, 1, generator=generator) * 6
    logits[1::6] = logits[1::6].bfloat16().float()
    logits[2::6] = logits[2::6].round()
    logits[3::6] = (2 * logits[3::6]).round() / 2 * torch.tensor([1.0, -0.0]).repeat(vocab_size // 2)
    forbidden = torch.rand(logits.shape, generator=generator) < torch.rand(num_rows, 1, generator=generator)
    forbidden[:, 0] = False
    logits[4::6] = logits[4::6].masked_fill(forbidden[4::6], -math.inf)
    logits[5::12] = 0.5
    return logits


def random_columns(generator: torch.Generator, num_rows: int = NUM_ROWS) -> Tensor:
    """Return uniform number, temperature, top-p, min-p and top-k of each row, [num_rows, 5] float64."""

    def draw() -> Tensor:
        return torch.rand(num_rows, generator=generator, dtype=torch.float64)

    top_p = torch.where(draw() < 0.3, 1.0, draw().clamp(min=1e-9))
    min_p = torch.where(draw() < 0.5, 0.0, 0.3 * draw() ** 3)
    top_k = torch.where(draw() < 0.4, math.inf, (1 + 70 * draw()).floor())
    top_k[draw() < 0.05] = 1.0
    uniform = draw()
    uniform[:2] = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64)
    return torch.stack([uniform, 0.2 + 2.0 * draw(), top_p, min_p, top_k], dim=1)


def by_definition(logits: Tensor, columns: Tensor) -> Tensor:
    return sample_truncated(logits, SamplingTensors(*columns[:, :, None].unbind(dim=1), needs_total=True))


def by_kernel(logits: Tensor, columns: Tensor, rows: Tensor | None = None, tile_rows: int = NUM_ROWS) -> Tensor:
    rows = torch.arange(len(columns)) if rows is None else rows
    flags = {"has_top_k": bool((columns[:, 4] < math.inf).any()), "has_top_p": bool((columns[:, 2] < 1).any())}
    return draw_truncated(logits, rows, columns.flatten(), logits.argmax(-1), **flags, tile_rows=tile_rows)


# 100,000 rows in all.
SEEDS = [seed if seed < NUM_QUICK else pytest.param(seed, marks=pytest.mark.deep) for seed in range(390)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_those_of_the_sorted_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, columns = random_logits(generator, VOCAB_SIZE), random_columns(generator)
    if seed % 3 == 1:
        columns[:, 4] = math.inf
    if seed % 3 == 2:
        columns[:, 2] = 1.0
    tokens = by_kernel(logits, columns)
    different = (tokens != by_definition(logits, columns)).nonzero()[:, 0]
    assert len(different) <= 1
    for row in different.tolist():
        assert int(tokens[row]) in tokens_within_rounding(logits[row], columns[row])


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 2600])
def test_draws_from_all_tokens_are_those_of_plain_torch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits, columns = random_logits(generator, vocab_size, 40), random_columns(generator, 40)
    expected = sample_full(logits, SamplingTensors(*columns[:, :, None].unbind(dim=1), needs_total=False))
    rows = torch.arange(39, 0, -2)
    columns[1] = 0.0
    tokens = torch.full((20,), -7)
    draw_full(logits, rows, columns[rows].flatten(), logits.argmax(-1), tokens)
    assert tokens[19] == -7, "a row of temperature 0 keeps its token"
    assert int((tokens != expected[rows]).sum()) <= 2 and tokens[:19].min() >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_most_probable_tokens_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = random_logits(generator, 2600, 24)
    logits[7, 900:], logits[8], logits[9, [5, 1999]], logits[10, 50] = math.nan, -math.inf, math.inf, -math.nan
    logits = logits.to(dtype)
    assert most_probable(logits).tolist() == logits.argmax(-1).tolist()
    assert most_probable(logits[:1]).tolist() == logits[:1].argmax(-1).tolist()


def settled(logits: Tensor, columns: Tensor, sizes: DrawSizes) -> Tensor:
    """Return which rows the search in brackets settles; their tokens are those of the definition."""
    rows, whole = torch.arange(len(logits)), 62 - logits.shape[1].bit_length()
    peaks = logits.argmax(-1)
    tokens = draw_in_brackets(logits, rows, columns.flatten(), peaks, whole, sizes, tile_rows=len(logits))
    is_settled = tokens >= 0
    assert tokens[is_settled].tolist() == by_definition(logits, columns)[is_settled].tolist()
    return is_settled


def test_brackets_settle_flat_rows_as_well_as_steep_ones() -> None:
    """Of every kind of sampling, with a list of a sixteenth of the tokens."""
    vocab_size = 16_384
    kinds = [(0.95, 0.0, math.inf), (1.0, 0.0, 50.0), (1.0, 0.05, math.inf), (0.9, 0.01, 1000.0)]
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, vocab_size, generator=generator)
    logits[1::2] *= 4
    columns = torch.tensor([[0.0, 1.0, *kind] for kind in kinds], dtype=torch.float64).repeat_interleave(2, dim=0)
    columns[:, 0] = torch.rand(8, generator=generator, dtype=torch.float64)
    assert settled(logits, columns, DrawSizes(4096, 1024)).all()


def test_rows_that_brackets_do_not_settle_are_drawn_all_the_same() -> None:
    generator = torch.Generator().manual_seed(6)
    logits, columns = random_logits(generator, VOCAB_SIZE, 64), random_columns(generator, 64)
    small = DrawSizes(64, 4)  # Wide buckets, and a list that is mostly full.
    num_settled = int(settled(logits, columns, small).sum())
    assert 5 < num_settled < 60
    rows, peaks = torch.arange(64), logits.argmax(-1)
    tokens = draw_truncated(
        logits, rows, columns.flatten(), peaks, has_top_k=True, has_top_p=True, tile_rows=64, sizes=small
    )
    assert tokens.tolist() == by_definition(logits, columns).tolist()


def tokens_within_rounding(logits: Tensor, columns: Tensor) -> list[int]:
    """Return the tokens by definition for numbers as near as weights in float32 and in float64 are."""
    near = columns.repeat(6, 1)
    for number, (column, factor) in enumerate((column, factor) for column in (0, 2, 3) for factor in (1e-6, -1e-6)):
        near[number, column] *= 1 + factor
    return by_definition(logits.repeat(6, 1), near).tolist()


def test_vocabularies_of_several_tiles_and_chosen_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, columns = random_logits(generator, 5002, num_rows=16), random_columns(generator, num_rows=8)
    rows = torch.arange(0, 16, 2)
    assert by_kernel(logits, columns, rows, tile_rows=8).tolist() == by_definition(logits[rows], columns).tolist()


def test_a_rows_token_does_not_depend_on_the_rows_of_its_program() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, columns = random_logits(generator, 64, num_rows=4), random_columns(generator, num_rows=4)
    expected = by_kernel(logits, columns, tile_rows=4).tolist()
    assert by_kernel(logits, columns, tile_rows=1).tolist() == expected


def test_rows_that_are_not_numbers_draw_some_valid_token() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    logits[0, 40], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    columns = torch.tensor([[0.7, 1.0, 0.9, 0.0, 20.0]], dtype=torch.float64).repeat(4, 1)
    tokens = by_kernel(logits, columns, tile_rows=4)
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert tokens[3] == by_definition(logits, columns)[3]


def test_the_check_at_start_up_passes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_draw(torch.device("cpu"), tile_rows=64) is None
    monkeypatch.setattr(triton_draw, "_CHECKED_ROWS", 8)  # A fault is found with few, too.
    monkeypatch.setattr(triton_draw, "sample_truncated", lambda logits, _: torch.zeros(len(logits), dtype=torch.int64))
    fault = check_draw(torch.device("cpu"), tile_rows=64)
    assert fault is not None and "rows draw another token" in fault


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes that tensors take which were made within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (pointer := leaf.untyped_storage().data_ptr()) not in given:
                self.live[pointer] = leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self.live.pop, pointer, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


@pytest.mark.parametrize("is_edited", [False, True])
def test_sampling_takes_at_most_sixteen_bytes_a_logit(is_edited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "has_draw_kernel", lambda _: True)
    edits = {"repetition_penalty": 1.2, "logit_bias": (LogitBias(3, 1.0),)} if is_edited else {}
    kinds = (SamplingParams(max_tokens=8, top_p=0.9, **edits), SamplingParams(max_tokens=8, **edits))
    logits = torch.randn(8, 16_384, generator=torch.Generator().manual_seed(5)).bfloat16()
    with LiveBytes() as live:
        results = sample(logits, [sequence(kinds[min(row, 1)]) for row in range(len(logits))])
    assert all(result.error is None for result in results)
    assert 4 * logits.numel() <= live.peak <= 16 * logits.numel()
