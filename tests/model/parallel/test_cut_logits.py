"""Logits of several ranks: the highest of each row are those of all tokens, and greedy steps gather nothing else."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replicas.model.parallel.cut_logits import CutLogits
from replicas.model.parallel.rank_group import RankGroup
from replicas.model.parallel.shares import Share
from replicas.model.sampling.sampler import sample_greedy
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.engine_runs import random_prompts, tokens
from testkit.model.rank_threads import following, load_parts, on_ranks
from testkit.model.tiny_checkpoints import VOCAB_SIZE

PROMPTS = random_prompts((5, 33))
NUM_OUTPUT_TOKENS = 16


def rows_of(vocab_size: int) -> Tensor:
    """Return logits with equal highest ones in several ranges, NaN, and no finite number."""
    rows = torch.randint(0, 4, (40, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    rows[1] = 0.0
    rows[2] = -math.inf
    rows[3] = math.nan
    rows[4, vocab_size - 1] = math.nan
    rows[5] = -math.inf
    rows[5, vocab_size - 1] = -5.0
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [5, 64, 509])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_logits_are_those_of_all_tokens(
    num_ranks: int, vocab_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The ranges go beyond the vocabulary, with high logits that have no meaning; the last one may hold no token."""
    rows = rows_of(vocab_size).to(dtype)
    size = -(-vocab_size // num_ranks)
    padded = torch.cat([rows, torch.full((len(rows), num_ranks * size - vocab_size), 9.0, dtype=dtype)], dim=1)

    def choose(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        group = RankGroup(Share(rank, num_ranks), torch.device("cpu"), tmp_path / "meeting")
        cut, part = CutLogits(group, vocab_size), padded[:, rank * size : (rank + 1) * size]
        chosen = sample_greedy(part, cut)
        return chosen.tokens, chosen.is_finite, cut.join(part)

    expected = sample_greedy(rows)
    for token_ids, is_finite, joined in on_ranks(num_ranks, choose):
        assert torch.equal(token_ids, expected.tokens) and torch.equal(is_finite, expected.is_finite)
        assert torch.equal(joined.nan_to_num(), rows.nan_to_num())


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}, {"allowed_token_ids": tuple(range(VOCAB_SIZE))}], ids=str)
def test_greedy_steps_gather_the_highest_logits_alone(
    params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = set()
    gather = RankGroup.gather

    def noted(group: RankGroup, part: Tensor) -> Tensor:
        widths.add(part.shape[-1])
        return gather(group, part)

    monkeypatch.setattr(RankGroup, "gather", noted)
    with following(load_parts(cached_checkpoint("llama"), 2)) as ranks:
        found = tokens(ranks.engine(), PROMPTS, SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, **params))
    assert found == cached_reference("llama", PROMPTS, NUM_OUTPUT_TOKENS)
    assert widths == ({VOCAB_SIZE // 2} if params else {2})
