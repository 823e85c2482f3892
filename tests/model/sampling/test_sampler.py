"""Sampling draws from the distribution that the params describe, row by row, whatever shares the batch."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.engine.sequence import Sequence
from replicas.model.sampling.multinomial import SamplingTensors, sample_full, uniforms
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams
from testkit.model.engine_runs import sample as sample_rows

pytestmark = pytest.mark.rotated

EOS = 2


def uniform(seed: int, index: int) -> float:
    return float(uniforms(np.array([seed % 2**64], np.uint64), np.array([index]))[0])


def sequence(params: SamplingParams, prompt: tuple[int, ...] = (5,), output: tuple[int, ...] = ()) -> Sequence:
    made = Sequence(GenerateRequest("request", prompt, params), arrival_s=0.0, deadline_s=None, arrival_index=0)
    made.token_ids.extend(output)
    return made


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    results = sample_rows(logits, sequences, frozenset({EOS}))
    assert all(result.error is None for result in results)
    return [result.token_id for result in results if result.token_id is not None]


def sample_many(logits: Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """Return the number of draws of each token from one row of logits with seeds 0..count - 1."""
    sequences = [sequence(replace(params, seed=seed)) for seed in range(count)]
    return Counter(sample(logits.expand(count, -1), sequences))


def expected_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution by definition, in float64: temperature, then min-p, top-k and top-p over a full sort."""
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = probabilities.argsort(descending=True, stable=True)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if params.min_p > 0:
        kept &= probabilities >= params.min_p * probabilities.max()
    if params.top_k is not None:
        kept[order[params.top_k :]] = False
    probabilities = torch.where(kept, probabilities, 0.0)
    probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0.0
    return probabilities / probabilities.sum()


def expected_draws(logits: Tensor, params: SamplingParams, seeds: Iterable[int]) -> list[int]:
    """Return the token that each seed's uniform number points at; truncation sorts the tokens, most probable first."""
    probabilities = expected_probabilities(logits, params)
    is_sorted = params != replace(params, top_k=None, top_p=1.0, min_p=0.0)
    order = probabilities.argsort(descending=True, stable=True) if is_sorted else torch.arange(len(logits))
    cumulative = probabilities[order].cumsum(0)
    return [int(order[torch.searchsorted(cumulative, uniform(seed, 0), right=True)]) for seed in seeds]


def chi_square_excess(counts: Counter[int], probabilities: Tensor) -> float:
    """Return the standard deviations by which the chi-square statistic exceeds its mean; rare tokens are pooled."""
    total = sum(counts.values())
    pairs = [(counts[token_id], probability * total) for token_id, probability in enumerate(probabilities.tolist())]
    bins = [pair for pair in pairs if pair[1] >= 5]
    rare = [pair for pair in pairs if pair[1] < 5]
    pooled = (sum(observed for observed, _ in rare), sum(expected for _, expected in rare))
    if pooled[1] >= 5:
        bins.append(pooled)
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in bins)
    freedom = len(bins) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


PARAMS = {
    "plain": SamplingParams(max_tokens=8),
    "hot": SamplingParams(max_tokens=8, temperature=1.7),
    "cold": SamplingParams(max_tokens=8, temperature=0.4),
    "top_k": SamplingParams(max_tokens=8, top_k=20),
    "top_k wide": SamplingParams(max_tokens=8, top_k=400),
    "top_p": SamplingParams(max_tokens=8, top_p=0.7),
    "top_p wide": SamplingParams(max_tokens=8, top_p=0.99, temperature=2.0),
    "min_p": SamplingParams(max_tokens=8, min_p=0.05),
    "min_p wide": SamplingParams(max_tokens=8, min_p=0.001, temperature=2.0),
    "all": SamplingParams(max_tokens=8, temperature=1.2, top_k=50, top_p=0.8, min_p=0.01),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(3)) * 2
    probabilities = expected_probabilities(logits[0], params)
    counts = sample_many(logits, params, 8000)
    assert chi_square_excess(counts, probabilities) < 4
    assert not [token_id for token_id in counts if probabilities[token_id] == 0]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_draw_is_the_inverse_of_the_distribution_function(params: SamplingParams) -> None:
    """Not only in distribution: each token is the one that the row's uniform number points at."""
    generator = torch.Generator().manual_seed(4)
    for seed in range(50):
        logits = torch.randn(1, 600, generator=generator) * 3
        assert sample(logits, [sequence(replace(params, seed=seed))]) == expected_draws(logits[0], params, [seed])


@pytest.mark.parametrize("spread", [0.1, 1.5, 3.0])
def test_large_vocabulary_is_truncated_exactly(spread: float) -> None:
    """The token is the same after a look at 256, some thousands or all of the tokens."""
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(11)) * spread
    params = SamplingParams(max_tokens=8, top_p=0.9)
    found = sample(logits.expand(50, -1), [sequence(replace(params, seed=seed)) for seed in range(50)])
    assert found == expected_draws(logits[0], params, range(50))


@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 1024, 1187 * 2**7, 50257])
def test_draw_from_the_whole_vocabulary_reaches_the_threshold_of_its_sum(vocab_size: int) -> None:
    """A few forbidden, equal and tiny logits, and uniform numbers at both ends of the interval."""
    generator = torch.Generator().manual_seed(vocab_size)
    for spread in (0.01, 3.0, 30.0):
        logits = spread * torch.randn(64, vocab_size, generator=generator)
        logits[:, ::2] = logits[:, ::2].round()
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -math.inf
        logits[:, vocab_size // 2] = 0.0
        drawn = torch.rand(64, 1, generator=generator, dtype=torch.float64)
        drawn[:2, 0] = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64)
        ones = torch.ones_like(drawn)
        tokens = sample_full(logits, SamplingTensors(drawn, 0.9 * ones, ones, 0 * ones, math.inf * ones, False))
        weights = torch.exp((logits - logits.amax(1, keepdim=True)).double() / 0.9)
        share = (weights.cumsum(1) / weights.sum(1, keepdim=True)).gather(1, tokens[:, None])
        own = (weights / weights.sum(1, keepdim=True)).gather(1, tokens[:, None])
        assert (own > 0).all()
        assert (share - own <= drawn + 1e-5).all()
        assert (share >= drawn - 1e-5).all()


def test_equal_logits_are_ordered_by_token_id() -> None:
    logits = torch.zeros(1, 2000)
    assert set(sample_many(logits, SamplingParams(max_tokens=8, top_k=10), 300)) == set(range(10))
    assert sample(logits, [sequence(SamplingParams(max_tokens=8, temperature=0.0))]) == [0]


def test_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(5)
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    kinds = [*PARAMS.values(), greedy, replace(greedy, repetition_penalty=1.5), replace(greedy, logprobs=3)]
    sequences = [
        sequence(replace(params, seed=index), prompt=(index, 7), output=(3,) * (index % 3))
        for index, params in enumerate(kinds * 3)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(len(sequences), 5000, generator=generator) * 3).to(dtype)
        alone = [sample(logits[row : row + 1], [made])[0] for row, made in enumerate(sequences)]
        assert sample(logits, sequences) == alone
        backwards = list(range(len(sequences)))[::-1]
        assert sample(logits[backwards], [sequences[row] for row in backwards]) == alone[::-1]


def test_uniform_numbers_are_uniform_and_independent_of_order() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, -1, 2**64 - 2, 2**31) for index in range(4000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    bins = Counter(int(number * 100) for number in numbers)
    assert sum((bins[i] - 200) ** 2 / 200 for i in range(100)) < 99 + 4 * math.sqrt(2 * 99)
    neighbours = sum(a * b for a, b in pairwise(numbers)) / (len(numbers) - 1)
    assert abs(neighbours - 0.25) < 0.006
    assert uniform(7, 3) == 0.34805850157913465  # Outputs of old seeds must not change


def test_penalties_equal_the_dense_formula() -> None:
    generator = torch.Generator().manual_seed(6)
    prompt, output = (5, 9, 9, 30), (9, 11, 11, 11, 40)
    params = SamplingParams(
        max_tokens=8, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25,
        logit_bias=(LogitBias(11, 1.0), LogitBias(77, 0.5)), logprobs=0,
    )  # fmt: skip
    for _ in range(200):
        logits = torch.randn(1, 100, generator=generator)
        dense = logits[0].clone()
        for token_id in set(prompt + output):
            dense[token_id] = dense[token_id] / 1.3 if dense[token_id] > 0 else dense[token_id] * 1.3
        for token_id, count in Counter(output).items():
            dense[token_id] -= 0.4 + 0.25 * count
        dense[11] += 1.0
        dense[77] += 0.5
        before = logits.clone()
        result = sample_rows(logits, [sequence(params, prompt, output)])[0]
        assert result.token_id == int(dense.argmax())
        assert torch.equal(logits, before)
        # Log probabilities are of the model's own logits.
        assert result.logprobs is not None
        assert result.logprobs.chosen.logprob == pytest.approx(float(logits[0].log_softmax(-1)[result.token_id]))


def test_large_logit_bias_forces_and_forbids() -> None:
    logits = torch.zeros(1, 50)
    force = SamplingParams(max_tokens=8, logit_bias=(LogitBias(17, 100.0),))
    assert set(sample_many(logits, force, 50)) == {17}
    forbid = SamplingParams(max_tokens=8, logit_bias=tuple(LogitBias(i, -100.0) for i in range(45)))
    assert set(sample_many(logits, forbid, 300)) == set(range(45, 50))


def test_stop_tokens_cannot_be_sampled_before_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 7] = 9.0, 8.0
    params = SamplingParams(max_tokens=8, temperature=0.0, min_tokens=2, stop_token_ids=(7, 99_999))
    kinds = [
        sequence(params, output=(4,)),
        sequence(params, output=(4, 4)),
        sequence(replace(params, ignore_eos=True), output=(4,)),
        sequence(replace(params, stop_token_ids=()), output=(4,)),
    ]
    assert sample(logits.expand(4, -1), kinds) == [0, EOS, EOS, 7]


def test_row_that_is_not_numbers_fails_alone() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(8))
    greedy = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
    kinds = (greedy, greedy, PARAMS["plain"], PARAMS["top_p"], greedy, PARAMS["all"])
    sequences = [sequence(params) for params in kinds]
    expected = sample_rows(logits, sequences)
    for bad in (math.nan, math.inf):
        broken = logits.clone()
        broken[1, 40] = broken[2, 3] = broken[3, 299] = bad
        results = sample_rows(broken, sequences)
        assert [row for row, result in enumerate(results) if result.error is not None] == [1, 2, 3]
        assert [results[row] for row in (0, 4, 5)] == [expected[row] for row in (0, 4, 5)]
    results = sample_rows(torch.full((2, 9), -math.inf), sequences[:2])
    assert all(result.error is not None and result.token_id is None for result in results)


def test_logprobs_are_log_softmax_of_the_models_logits() -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    params = SamplingParams(max_tokens=8, temperature=0.3, seed=1)
    sequences = [sequence(replace(params, logprobs=count)) for count in (0, 5, 400)]
    reference = logits.float().log_softmax(-1)
    for row, result in enumerate(sample_rows(logits, sequences)):
        assert result.logprobs is not None
        top = result.logprobs.top
        assert len(top) == (0, 5, 400)[row]
        best = reference[row].sort(descending=True).values[: len(top)].tolist()
        assert [entry.logprob for entry in top] == pytest.approx(best, abs=1e-5)
        for entry in (result.logprobs.chosen, *top):
            assert entry.logprob == pytest.approx(float(reference[row, entry.token_id]), abs=1e-5)
        assert result.logprobs.chosen.token_id == result.token_id


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(10))
    for temperature in (1e-300, 1e-6, 1e-4):
        made = sequence(SamplingParams(max_tokens=8, temperature=temperature))
        assert sample(logits, [made]) == [int(logits.argmax())]
