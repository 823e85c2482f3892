"""Log probabilities of tokens, from the model's raw logits: without temperature, penalties and bias."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from replicas.model.batch.transfers import DeviceToHostBuffer, PendingTensor
from replicas.model.hardware.selfcheck import kernels_work
from replicas.protocol import PositionLogprobs, TokenLogprob

# Rows converted to float32 at once. It bounds the memory of the copies.
_MAX_SLICE_ROWS = 64


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities on their way to the host: per row the chosen token's, then those of the most probable."""

    values: PendingTensor  # [num_rows, 1 + max_top] float32
    top_ids: PendingTensor  # [num_rows, max_top] int64

    def read(self, to_host: DeviceToHostBuffer, token_ids: Items[int], num_top: Items[int]) -> list[PositionLogprobs]:
        """Return the log probabilities, one per row, after `to_host.wait()`.

        Args:
            to_host: the step's results.
            token_ids: chosen token of each row.
            num_top: number of most probable tokens to return for each row.
        """
        return [
            PositionLogprobs(
                TokenLogprob(token_id, row_values[0]),
                tuple(map(TokenLogprob, row_ids[:count], row_values[1 : 1 + count])),
            )
            for token_id, count, row_values, row_ids in zip(
                token_ids, num_top, to_host[self.values].tolist(), to_host[self.top_ids].tolist(), strict=True
            )
        ]


@cache
def has_score_kernel(device: torch.device) -> bool:
    """Return True if a kernel finds log probabilities on `device`, as it does on a GPU with Triton."""

    def check() -> str | None:
        from replicas.model.sampling.triton_logprobs import check_scores

        return check_scores(device)

    return kernels_work(device, check, "log probabilities are slow")


def launch_logprobs(logits: Tensor, chosen_ids: Tensor, max_top: int, to_host: DeviceToHostBuffer) -> PendingLogprobs:
    """Launch the log probabilities of one chosen token and of the `max_top` most probable tokens of each row.

    Args:
        logits: [num_rows, vocab_size], any float type.
        chosen_ids: [num_rows] int64
        max_top: may be 0.
        to_host: buffer that receives the results.
    """
    max_top = min(max_top, logits.shape[1])
    if has_score_kernel(logits.device):
        from replicas.model.sampling.triton_logprobs import MOST_TOP, scored

        if max_top <= MOST_TOP:
            found, ids = scored(logits, chosen_ids, max_top)
            return PendingLogprobs(to_host.add(found), to_host.add(ids))
    values, top_ids = [], []
    for first in range(0, len(chosen_ids), _MAX_SLICE_ROWS):
        rows = slice(first, first + _MAX_SLICE_ROWS)
        row_logits = logits[rows].float()
        top = row_logits.topk(max_top, dim=-1)
        selected_logits = torch.cat([row_logits.gather(1, chosen_ids[rows, None]), top.values], dim=1)
        values.append(selected_logits - row_logits.logsumexp(dim=-1, keepdim=True))
        top_ids.append(top.indices)
    return PendingLogprobs(to_host.add(torch.cat(values)), to_host.add(torch.cat(top_ids)))
