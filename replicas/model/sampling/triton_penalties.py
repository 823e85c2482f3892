"""Penalties and token masks of logits on a GPU: one launch each, without copies of the logits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from replicas.model.sampling.masks import RowMasks
from replicas.model.sampling.token_counts import IN_PROMPT, penalize_by_definition
from replicas.model.sampling.triton_kernels import mask_kernel, penalize_kernel

_TILE = 1024
_CHECKED_ROWS, _CHECKED_VOCAB_SIZE = 6, 2500
_TOLERANCE = 1e-5


def penalize(logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
    """Change logits by their penalties. See `Penalize`; rows of logits, counts and penalties are contiguous."""
    assert logits.stride(1) == 1 and counts.is_contiguous() and penalties.is_contiguous()
    vocab_size = counts.shape[1]
    penalize_kernel[(len(rows), triton.cdiv(vocab_size, _TILE))](
        logits, rows, slots, penalties, counts, vocab_size, logits.stride(0), TILE=_TILE, IN_PROMPT=IN_PROMPT
    )


def mask(logits: Tensor, bits: Tensor) -> None:
    """Change logits [num_rows, vocab_size] float32 by the masks of their rows, as `RowMasks` does.

    `bits` is [num_rows, mask_bytes] uint8, with a bit for each token.
    """
    assert logits.stride(1) == 1 and bits.is_contiguous() and 8 * bits.shape[1] >= logits.shape[1]
    num_rows, vocab_size = logits.shape
    mask_kernel[(num_rows, triton.cdiv(vocab_size, _TILE))](
        logits, bits, vocab_size, logits.stride(0), bits.stride(0), TILE=_TILE
    )


def check_penalties(device: torch.device) -> str | None:
    """Return a description of the difference to `penalize_by_definition` and `RowMasks`; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(_CHECKED_ROWS, _CHECKED_VOCAB_SIZE, generator=generator)).to(device)
    counts = torch.randint(-3, 4, logits.shape, generator=generator).clamp(min=0)
    counts[:, ::5] += IN_PROMPT
    counts = counts.int().to(device)
    penalties = torch.tensor([[1.3, 0.4, 0.2], [1.0, -0.5, 0.7], [0.8, 0.0, 0.0]], dtype=torch.float64, device=device)
    rows, slots = (torch.tensor(indices, device=device) for indices in ([4, 0, 1], [1, 5, 0]))
    bits = torch.randint(0, 256, (_CHECKED_ROWS, -(-_CHECKED_VOCAB_SIZE // 8)), generator=generator)
    bits = bits.to(device, torch.uint8)
    expected, penalized, masked = logits.clone(), logits.clone(), logits.clone()
    try:
        penalize(penalized, rows, slots, penalties, counts)
        penalize_by_definition(expected, rows, slots, penalties, counts)
        error = float((penalized - expected).abs().max())
        mask(masked, bits)
        RowMasks(torch.arange(_CHECKED_ROWS, device=device), bits).apply(logits)
        are_equal = torch.equal(masked, logits)
    except Exception as failure:  # The errors of Triton and torch have no other common class.
        return f"{type(failure).__name__}: {failure}"
    if not are_equal:
        return "masked logits differ from those of plain torch"
    return None if error <= _TOLERANCE else f"penalties differ from plain torch by {error:.1e}"
