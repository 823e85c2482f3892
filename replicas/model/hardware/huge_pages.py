"""Memory in pages of 2 MiB, on CPU.

Read in order, weights came at 26-31 GB/s from it, at 18-20 from pages of 4 KiB (Zen 4; on Sapphire Rapids alike).

A processor's own fetching ahead stops at the end of a page, and it knows the addresses of few pages at a time.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

# From linux/mman.h; Python knows it where it was built for such a system.
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_PAGE = 2 * 2**20
_ALIGNMENT = 64  # a cache line, as torch aligns


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on CPU, in huge pages where the system gives them; memory is taken when it is first written to."""
    if _MADV_HUGEPAGE is None:
        return torch.zeros(shape, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    # Private: what Python takes by default could be shared, and of such memory Linux mostly makes no huge pages.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # Of a kernel without them: the pages are small.
        memory.madvise(_MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(*shape)


def move_to_huge_pages(model: nn.Module) -> None:
    """Put the parameters of `model` side by side into huge pages, in order; what shares memory goes on sharing it.

    At no time are more than one parameter held twice.
    """
    groups = _by_memory(parameter for parameter in model.parameters() if _can_move(parameter))
    memory = huge_zeros((sum(_room(same[0]) for same in groups),), torch.uint8)
    start = 0
    for same in groups:
        first = same[0]
        moved = memory[start : start + first.nbytes].view(first.dtype).view(first.shape)
        moved.copy_(first.detach())
        for parameter in same:
            parameter.data = moved.view(parameter.shape)
        start += _room(first)


def _can_move(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.nbytes > 0


def _by_memory(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that are the same numbers in the same memory together."""
    groups: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.data_ptr(), parameter.nbytes, parameter.dtype), []).append(parameter)
    return list(groups.values())


def _room(parameter: Tensor) -> int:
    return -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
