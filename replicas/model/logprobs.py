"""Log probabilities of tokens, from the model's own logits: before temperature, penalties and bias."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from replicas.protocol import PositionLogprobs, TokenLogprob

# Bounds the float32 copies made at once.
_MAX_SLICE_ROWS = 64


def position_logprobs(logits: Tensor, token_ids: Items[int], num_top: Items[int]) -> list[PositionLogprobs]:
    """Log probabilities of the tokens that were chosen, and of the likeliest, at each row.

    Args:
        logits: [num_rows, vocab_size], any float type.
        token_ids: the chosen token of each row.
        num_top: how many of the likeliest tokens each row wants, possibly 0.
    """
    results: list[PositionLogprobs] = []
    for first in range(0, len(token_ids), _MAX_SLICE_ROWS):
        rows = slice(first, first + _MAX_SLICE_ROWS)
        results.extend(_slice_logprobs(logits[rows].float(), token_ids[rows], num_top[rows]))
    return results


def _slice_logprobs(logits: Tensor, token_ids: Items[int], num_top: Items[int]) -> list[PositionLogprobs]:
    chosen_ids = torch.tensor(token_ids, dtype=torch.int64).to(logits.device, non_blocking=True)[:, None]
    top_values, top_ids = logits.topk(min(max(num_top), logits.shape[1]), dim=-1)
    values = torch.cat([logits.gather(1, chosen_ids), top_values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    return [
        PositionLogprobs(
            TokenLogprob(token_id, row_values[0]),
            tuple(map(TokenLogprob, row_ids[:count], row_values[1 : 1 + count])),
        )
        for token_id, count, row_values, row_ids in zip(
            token_ids, num_top, values.tolist(), top_ids.tolist(), strict=True
        )
    ]
