"""What a step sends to its device and gets back: one copy there, one wait back."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Where some numbers of a step lie among all of them."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Placed:
    """A step's numbers on the device; views of one tensor that belongs to this step alone."""

    def __init__(self, words: Tensor) -> None:
        self._words = words

    def ints(self, span: Span) -> Tensor:
        """The whole numbers of `span`, [len(span)] int64."""
        return self._words[span.start : span.end]

    def floats(self, span: Span) -> Tensor:
        """The numbers of `span`, [len(span)] float64."""
        return self._words[span.start : span.end].view(torch.float64)


class Outbox:
    """Numbers that a step needs on its device, gathered on the host so that they travel together.

    Each takes 8 bytes, whatever it is. Spans begin at multiples of 16 bytes: kernels are compiled again for
    pointers that are aligned in another way.
    """

    def __init__(self) -> None:
        self._words = array("q")

    def ints(self, numbers: Iterable[int]) -> Span:
        """Add whole numbers."""
        start = self._align()
        self._words.extend(numbers)
        return Span(start, len(self._words))

    def floats(self, numbers: Iterable[float]) -> Span:
        """Add numbers in double precision."""
        start = self._align()
        self._words.frombytes(array("d", numbers).tobytes())
        return Span(start, len(self._words))

    def send(self, device: torch.device) -> Placed:
        """Begin the one copy to `device`, which nobody waits for."""
        if not self._words:
            return Placed(torch.empty(0, dtype=torch.int64, device=device))
        return Placed(begin_copy(torch.frombuffer(self._words, dtype=torch.int64), device))

    def _align(self) -> int:
        if len(self._words) % 2 == 1:
            self._words.append(0)
        return len(self._words)


def begin_copy(words: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the host as it will be on `device`, which nobody waits for."""
    if device.type == "cpu":
        return words
    # From other memory the copy would wait for the work before it. The caching allocator keeps pinned memory until the
    # copies from it are done.
    return torch.empty_like(words, pin_memory=True).copy_(words).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Letter:
    """Which of a step's results a tensor is."""

    index: int


class Inbox:
    """Tensors that the host wants of a step, copied as they are when asked for; nobody waits before `wait`."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Letter:
        """Ask for a tensor. What is launched later may change it."""
        if tensor.device.type == "cpu":
            self._tensors.append(tensor.clone())
        else:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensors.append(on_host.copy_(tensor, non_blocking=True))
        return Letter(len(self._tensors) - 1)

    def close(self, device: torch.device) -> None:
        """Note that everything has been asked for."""
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when everything has arrived: a step's one synchronisation."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def __getitem__(self, letter: Letter) -> Tensor:
        return self._tensors[letter.index]
