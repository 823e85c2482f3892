"""Transfers of a step: one copy of all inputs to the device, and one wait for all results."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Span = range
"""Range of words in a step's buffer."""
_FIRST_WORDS = 64
"""Numbers for which a new buffer has room, enough for most steps that send new blocks alone."""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Numbers of one step on the device, as views of one tensor that only this step reads."""

    words: Tensor
    last_tokens: Tensor
    """[num_rows] int64: tokens that the step before sampled. The host may not know them yet."""

    @classmethod
    def of(cls, words: np.ndarray, last_tokens: Tensor) -> DeviceBuffer:
        """Start the asynchronous copy of `words`, int64, to the device of `last_tokens`."""
        if not len(words):
            return cls(last_tokens.new_empty(0), last_tokens)
        return cls(begin_copy(torch.from_numpy(words), last_tokens.device), last_tokens)

    def ints(self, span: Span) -> Tensor:
        """Return the integers of `span`, [len(span)] int64."""
        return self.words[span.start : span.stop]

    def floats(self, span: Span) -> Tensor:
        """Return the floats of `span`, [len(span)] float64."""
        return self.words[span.start : span.stop].view(torch.float64)


class HostToDeviceBuffer:
    """Numbers that a step needs on its device, collected on the host for one copy.

    Each number takes 8 bytes. Spans begin at multiples of 16 bytes, because Triton compiles a kernel again for pointers
    of another alignment.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(_FIRST_WORDS, np.int64)
        self._size = 0

    @property
    def words(self) -> np.ndarray:
        """All numbers [num_words] int64, floats by their bits."""
        return self._numbers[: self._size]

    def room(self, size: int) -> tuple[Span, np.ndarray]:
        """Add `size` zeros and return their span, and the zeros. Write there before anything else is added."""
        start = self._size + self._size % 2
        end = self._size = start + size
        if end > len(self._numbers):
            self._numbers = np.append(self._numbers, np.zeros(end, np.int64))
        return Span(start, end), self._numbers[start:end]

    def ints(self, numbers: Items[int] | np.ndarray) -> Span:
        """Add integers and return their span."""
        span, room = self.room(len(numbers))
        room[:] = numbers
        return span

    def floats(self, numbers: Items[float] | np.ndarray) -> Span:
        """Add floats, in double precision, and return their span."""
        span, room = self.room(len(numbers))
        room.view(np.float64)[:] = numbers
        return span

    def numbers(self, span: Span) -> np.ndarray:
        """Return the numbers of `span` as integers, [len(span)] int64; those of floats are their bits."""
        return self._numbers[span.start : span.stop]


def no_tokens(device: torch.device) -> Tensor:
    """Return the tokens that no step has sampled, [0] int64."""
    return torch.empty(0, dtype=torch.int64, device=device)


def begin_copy(words: Tensor, device: torch.device) -> Tensor:
    """Start an asynchronous copy of `words` to `device` and return the copy; on CPU, return `words` itself."""
    if device.type == "cpu":
        return words
    # Use pinned memory: a copy from pageable memory waits for earlier work. The caching allocator keeps pinned memory
    # until the copies from it are done.
    return torch.empty_like(words, pin_memory=True).copy_(words).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """Index of a tensor among a step's results."""

    index: int


class DeviceToHostBuffer:
    """Results of a step, copied to the host asynchronously. Only `wait` waits for the device."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Results in order of the `add` calls. Read them after `wait`."""
        self._arrived: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> PendingTensor:
        """Start a copy of `tensor` to the host. Later launches may change `tensor` without changing the copy."""
        if tensor.device.type == "cpu":
            self.tensors.append(tensor.clone())
        else:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensors.append(on_host.copy_(tensor, non_blocking=True))
        return PendingTensor(len(self.tensors) - 1)

    def close(self, device: torch.device) -> None:
        """Record an event after the last copy. Call it after all `add` calls."""
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))

    def has_arrived(self) -> bool:
        """Return True if all copies are done."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until all copies are done; it is the step's only synchronisation."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def __getitem__(self, pending: PendingTensor) -> Tensor:
        return self.tensors[pending.index]
