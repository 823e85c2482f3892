"""Log probabilities on a GPU: several programs a row find its most probable tokens and the sum of its weights."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from replicas.model.sampling.triton_kernels import score_kernel

MOST_TOP = 32
"""Most tokens that the kernel finds in each part of a row."""
_LEAST_TOP = 8
_TILE = 1024
_LARGEST_ID = 2**31 - 1
_CHECKED_ROWS, _CHECKED_VOCAB_SIZE, _CHECKED_TOP = 6, 2500, 5
_TOLERANCE = 1e-4


def scored(logits: Tensor, chosen_ids: Tensor, max_top: int) -> tuple[Tensor, Tensor]:
    """Return the log probabilities [num_rows, 1 + max_top] of chosen and most probable tokens, and the latter's ids.

    `logits` is [num_rows, vocab_size], any float type, with contiguous rows; `max_top` is at most `MOST_TOP`. Of
    equally probable tokens the first one by id comes first.
    """
    assert logits.stride(1) == 1 and max_top <= MOST_TOP
    num_rows, vocab_size = logits.shape
    num_parts, num_top = triton.cdiv(vocab_size, _TILE), max(_LEAST_TOP, int(triton.next_power_of_2(max_top)))
    best = torch.empty(num_rows, num_parts, num_top, dtype=torch.int64, device=logits.device)
    sums = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    score_kernel[(num_rows, num_parts)](
        logits, best, sums, vocab_size, logits.stride(0), num_parts, TILE=_TILE, NUM_TOP=num_top
    )
    top_ids = _LARGEST_ID - (best.view(num_rows, -1).topk(max_top, dim=-1).values & _LARGEST_ID)
    selected = logits.gather(1, torch.cat([chosen_ids[:, None], top_ids], dim=1)).float()
    return selected - sums.logsumexp(dim=-1, keepdim=True), top_ids


def check_scores(device: torch.device) -> str | None:
    """Return a description of the difference to torch's `log_softmax`; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(_CHECKED_ROWS, _CHECKED_VOCAB_SIZE, generator=generator)).to(device)
    chosen = torch.arange(_CHECKED_ROWS, device=device)
    try:
        values, top_ids = scored(logits, chosen, _CHECKED_TOP)
        expected = logits.log_softmax(dim=-1)
        top = expected.topk(_CHECKED_TOP, dim=-1)
        error = float((values - torch.cat([expected.gather(1, chosen[:, None]), top.values], dim=1)).abs().max())
        are_equal = torch.equal(top_ids, top.indices)
    except Exception as failure:  # The errors of Triton and torch have no other common class.
        return f"{type(failure).__name__}: {failure}"
    return None if are_equal and error <= _TOLERANCE else f"log probabilities differ from plain torch by {error:.1e}"
