"""Logits of which each rank computes those of a range of the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.parallel.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class CutLogits:
    """Logits of a model with `vocab_size` tokens: rank r has those of the r-th range, [num_rows, size of the ranges].

    The last ranges may go beyond the vocabulary; logits there have no meaning.
    """

    group: RankGroup
    vocab_size: int

    def join(self, part: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] of all tokens, the same on each rank."""
        return self.group.gather(part)[:, : self.vocab_size]

    def highest(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's highest logit, [num_rows] float64, and its token id, [num_rows] int64.

        Only these are gathered. Of equal logits the first token has it, and a NaN is higher than any number, as for
        `argmax` of all logits.
        """
        first = self.group.share.rank * part.shape[1]
        num_known = min(part.shape[1], self.vocab_size - first)
        known = part[:, :num_known] if num_known > 0 else part.new_full((len(part), 1), -math.inf)
        indices = known.argmax(dim=-1, keepdim=True)
        # All ids of a vocabulary are exact in float64.
        own = torch.cat([known.gather(1, indices).double(), (first + indices).double()], dim=1)
        values, token_ids = self.group.gather(own).view(len(part), -1, 2).unbind(dim=-1)  # [num_rows, num_ranks]
        ranks = values.argmax(dim=-1, keepdim=True)
        return values.gather(1, ranks)[:, 0], token_ids.gather(1, ranks)[:, 0].long()
