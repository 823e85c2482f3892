"""Sampling from the most probable tokens on a GPU: one launch, without a sort and without copies of the logits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from replicas.model.sampling.multinomial import SamplingTensors, sample_truncated
from replicas.model.sampling.triton_kernels import draw_kernel

_NUM_COLUMNS = 5
# Logits in a program's tile, and its warps: with more, compute capability 8.0 has too few registers.
_TILE = 2048
_NUM_WARPS = 8
_MASS_BITS = 62
# A uniform number may lie where two ways to round an exponential function differ.
_MAX_DIFFERENT_ROWS = 1
_CHECKED_ROWS, _CHECKED_VOCAB_SIZE = 64, 5000


def draw_truncated(
    logits: Tensor, rows: Tensor, columns: Tensor, *, has_top_k: bool, has_top_p: bool, tile_rows: int = 1
) -> Tensor:
    """Return token ids [num_rows] int64, drawn as by `sample_truncated` from `rows` of `logits`.

    Args:
        logits: [., vocab_size] float32, with contiguous rows.
        rows: [num_rows] int64.
        columns: [5 * num_rows] float64: uniform number, temperature, top-p, min-p and top-k of each row.
        has_top_k: True if some row has a finite top-k.
        has_top_p: True if some row has a top-p below 1.
        tile_rows: rows of one program. One is best on a device; more are faster in Triton's interpreter.
    """
    assert logits.stride(1) == 1 and len(columns) == _NUM_COLUMNS * len(rows)
    tokens = torch.empty_like(rows)
    vocab_size = logits.shape[1]
    draw_kernel[(triton.cdiv(len(rows), tile_rows),)](
        logits,
        rows,
        columns,
        tokens,
        len(rows),
        vocab_size,
        logits.stride(0),
        int(has_top_k),
        int(has_top_p),
        TILE_ROWS=tile_rows,
        TILE=min(_TILE, int(triton.next_power_of_2(vocab_size))),
        WHOLE=float(2 ** (_MASS_BITS - vocab_size.bit_length())),
        num_warps=_NUM_WARPS,
    )
    return tokens


def check_draw(device: torch.device, tile_rows: int = 1) -> str | None:
    """Return a description of the difference to `sample_truncated`, which sorts; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(_CHECKED_ROWS, _CHECKED_VOCAB_SIZE, generator=generator)).to(device)
    logits[::2] = logits[::2].round()
    drawn = torch.rand(_CHECKED_ROWS, generator=generator, dtype=torch.float64)
    columns = torch.stack([drawn, *(torch.ones_like(drawn) for _ in range(_NUM_COLUMNS - 1))], dim=1)
    columns[:, 2], columns[::4, 3], columns[:, 4] = 0.9, 0.01, torch.inf
    columns[::3, 4] = 50.0
    columns = columns.to(device)
    drawn, temperature, top_p, min_p, top_k = columns[:, :, None].unbind(dim=1)
    sampling = SamplingTensors(drawn, temperature, top_p, min_p, top_k, needs_total=True)
    try:
        rows = torch.arange(_CHECKED_ROWS, device=device)
        tokens = draw_truncated(logits, rows, columns.flatten(), has_top_k=True, has_top_p=True, tile_rows=tile_rows)
    except Exception as error:  # The errors of Triton and torch have no other common class.
        return f"{type(error).__name__}: {error}"
    num_different = int((tokens != sample_truncated(logits, sampling)).sum())
    if num_different <= _MAX_DIFFERENT_ROWS:
        return None
    return f"{num_different} of {_CHECKED_ROWS} rows draw another token than with a sort"
