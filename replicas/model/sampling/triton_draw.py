"""Random sampling on a GPU, without copies of the logits; from the most probable tokens without a sort."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from replicas.model.sampling.multinomial import SamplingTensors, sample_full, sample_truncated
from replicas.model.sampling.triton_bracket_kernels import bracket_kernel, count_kernel, gather_kernel, settle_kernel
from replicas.model.sampling.triton_kernels import draw_kernel, full_kernel, mass_kernel, peak_kernel

_NUM_COLUMNS = 5
# Logits in a program's tile, and its warps: with more, compute capability 8.0 has too few registers.
_TILE = 2048
_NUM_WARPS = 8
# The same for the search in brackets, whose programs hold more numbers for each logit, and its largest sizes.
_BRACKET_TILE, _NUM_BUCKETS, _CAPACITY = 1024, 4096, 4096
_MASS_BITS = 62
# Tokens of a part of a row that draws from all tokens.
_PART = 1024
# Programs that divide the rows among them: several for each processor, so that no last one computes alone for long.
_NUM_PROGRAMS = 1024
_LARGEST_ID = 2**31 - 1
_NUM_SUMS, _NUM_BRACKET_FIELDS = 5, 8
# A uniform number may lie where two ways to round an exponential function differ.
_MAX_DIFFERENT_ROWS = 1
_CHECKED_ROWS, _CHECKED_VOCAB_SIZE = 64, 5000


@dataclass(frozen=True, slots=True)
class DrawSizes:
    """Sizes of the search in brackets. They decide how often it settles a row, and never the row's token."""

    num_buckets: int
    capacity: int
    """Most tokens that a row may list."""

    @classmethod
    def of(cls, vocab_size: int) -> DrawSizes:
        """Return the sizes for a vocabulary."""
        width = int(triton.next_power_of_2(vocab_size))
        return cls(min(_NUM_BUCKETS, 8 * width), min(_CAPACITY, width))


def draw_truncated(
    logits: Tensor,
    rows: Tensor,
    columns: Tensor,
    peaks: Tensor,
    *,
    has_top_k: bool,
    has_top_p: bool,
    tile_rows: int = 1,
    sizes: DrawSizes | None = None,
) -> Tensor:
    """Return token ids [num_rows] int64, drawn as by `sample_truncated` from `rows` of `logits`.

    Args:
        logits: [., vocab_size] float32, with contiguous rows.
        rows: [num_rows] int64.
        columns: [5 * num_rows] float64: uniform number, temperature, top-p, min-p and top-k of each row.
        peaks: [len(logits)] int64: the most probable token of each row of `logits`.
        has_top_k: True if some row has a finite top-k.
        has_top_p: True if some row has a top-p below 1.
        tile_rows: rows of one program. One is best on a device; more are faster in Triton's interpreter.
        sizes: sizes of the search; None: those for the vocabulary.
    """
    assert logits.stride(1) == 1 and len(columns) == _NUM_COLUMNS * len(rows)
    num_rows, vocab_size = len(rows), logits.shape[1]
    whole = _MASS_BITS - vocab_size.bit_length()
    sizes = sizes or DrawSizes.of(vocab_size)
    tokens = draw_in_brackets(logits, rows, columns, peaks, whole, sizes, tile_rows=tile_rows)
    draw_kernel[(triton.cdiv(num_rows, tile_rows),)](
        logits,
        rows,
        columns,
        tokens,
        num_rows,
        vocab_size,
        logits.stride(0),
        int(has_top_k),
        int(has_top_p),
        TILE_ROWS=tile_rows,
        TILE=min(_TILE, int(triton.next_power_of_2(vocab_size))),
        WHOLE=float(2**whole),
        num_warps=_NUM_WARPS,
    )
    return tokens


def most_probable(logits: Tensor) -> Tensor:
    """Return the first of the most probable tokens of each row of `logits`, any float type, [num_rows] int64.

    A NaN counts as more probable than all numbers, as for `torch.argmax`, whose programs have a whole row each.
    """
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    num_parts, part_size = _parts(num_rows, vocab_size, _BRACKET_TILE)
    peaks = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    peak_kernel[(num_rows, num_parts)](logits, peaks, vocab_size, logits.stride(0), part_size, TILE=_BRACKET_TILE)
    return _LARGEST_ID - (peaks & _LARGEST_ID)


def _parts(num_rows: int, vocab_size: int, tile: int) -> tuple[int, int]:
    """Return the number of parts that each row is divided into, and their size: a multiple of a tile."""
    num_tiles = triton.cdiv(vocab_size, tile)
    part_size = tile * triton.cdiv(num_tiles, min(num_tiles, max(1, _NUM_PROGRAMS // num_rows)))
    return triton.cdiv(vocab_size, part_size), part_size


def draw_full(logits: Tensor, rows: Tensor, columns: Tensor, peaks: Tensor, tokens: Tensor) -> None:
    """Write to `tokens` [num_rows] int64 draws as by `sample_full` from `rows` of `logits`.

    `logits` may have any float type. Rows of temperature 0 keep their tokens. See `draw_truncated` for the others.
    """
    assert logits.stride(1) == 1 and len(columns) == _NUM_COLUMNS * len(rows)
    num_rows, vocab_size = len(rows), logits.shape[1]
    num_parts = triton.cdiv(vocab_size, _PART)
    width = int(triton.next_power_of_2(num_parts))
    constants = {"TILE": _PART, "NUM_PARTS": width, "WHOLE": float(2 ** (_MASS_BITS - vocab_size.bit_length()))}
    masses = torch.zeros(num_rows * width, dtype=torch.int64, device=rows.device)
    mass_kernel[(num_rows, num_parts)](logits, rows, columns, peaks, masses, vocab_size, logits.stride(0), **constants)
    full_kernel[(num_rows,)](
        logits, rows, columns, peaks, masses, tokens, vocab_size, logits.stride(0), **constants
    )  # fmt: skip


def draw_in_brackets(
    logits: Tensor, rows: Tensor, columns: Tensor, peaks: Tensor, whole: int, sizes: DrawSizes, *, tile_rows: int = 1
) -> Tensor:
    """Return the tokens of the rows that the search in brackets settles, and -1 for all others.

    `whole` is the logarithm to base 2 of the mass of the most probable token. See `draw_truncated` for the others.
    """
    num_rows, vocab_size, stride = len(rows), logits.shape[1], logits.stride(0)
    tile = min(_BRACKET_TILE, int(triton.next_power_of_2(vocab_size)))
    num_parts, part_size = _parts(num_rows, vocab_size, tile)
    # A token beyond the last bucket has a weight so small that its mass is 0.
    scale = sizes.num_buckets / ((whole + 1) * math.log(2))
    num_counts = num_rows * sizes.num_buckets // 2
    work = torch.zeros(num_counts + num_rows * _NUM_SUMS, dtype=torch.int64, device=rows.device)
    counts, sums = work[:num_counts].view(torch.int32), work[num_counts:]
    brackets = torch.empty(num_rows * _NUM_BRACKET_FIELDS, dtype=torch.int32, device=rows.device)
    values = torch.empty(num_rows * sizes.capacity, dtype=torch.float32, device=rows.device)
    ids = torch.empty_like(values, dtype=torch.int32)
    tokens = torch.empty_like(rows)
    row_tiles = triton.cdiv(num_rows, tile_rows)
    constants = {"TILE_ROWS": tile_rows, "NUM_BUCKETS": sizes.num_buckets, "num_warps": _NUM_WARPS}
    lists = {"CAPACITY": sizes.capacity, "WHOLE": float(2**whole)}
    count_kernel[(num_rows, num_parts)](
        logits, rows, peaks, columns, counts, vocab_size, stride, scale, part_size,
        TILE=tile, NUM_BUCKETS=sizes.num_buckets, num_warps=_NUM_WARPS,
    )  # fmt: skip
    bracket_kernel[(row_tiles,)](columns, counts, brackets, num_rows, vocab_size, scale, **constants)
    gather_kernel[(row_tiles, num_parts)](
        logits, rows, peaks, columns, brackets, sums, values, ids, num_rows, vocab_size, stride, scale, part_size,
        TILE=tile, **constants, **lists,
    )  # fmt: skip
    settle_kernel[(row_tiles,)](
        logits, rows, peaks, columns, brackets, sums, values, ids, tokens, num_rows, vocab_size, stride, scale,
        **constants, **lists,
    )  # fmt: skip
    return tokens


def check_draw(device: torch.device, tile_rows: int = 1) -> str | None:
    """Return a description of the difference to `sample_truncated`, `sample_full` and `argmax`; None: there is none."""
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
        peaks = most_probable(logits)
        tokens = draw_truncated(
            logits, rows, columns.flatten(), peaks, has_top_k=True, has_top_p=True, tile_rows=tile_rows
        )
        full = torch.empty_like(tokens)
        draw_full(logits, rows, columns.flatten(), peaks, full)
    except Exception as error:  # The errors of Triton and torch have no other common class.
        return f"{type(error).__name__}: {error}"
    if not torch.equal(peaks, logits.argmax(-1)):
        return "some most probable tokens are others than in plain torch"
    for found, expected in ((tokens, sample_truncated(logits, sampling)), (full, sample_full(logits, sampling))):
        num_different = int((found != expected).sum())
        if num_different > _MAX_DIFFERENT_ROWS:
            return f"{num_different} of {_CHECKED_ROWS} rows draw another token than in plain torch"
    return None
