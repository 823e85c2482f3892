"""Token masks of sequences that may not take every token; threads fill them while the device computes."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from replicas.engine.batch import BatchColumns
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.model.batch.transfers import begin_copy


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some rows of the logits, on their device."""

    rows: Tensor  # [num_masks] int64: the constrained rows
    bits: Tensor  # [num_masks, mask_bytes] uint8: one bit for each token id, the lowest bit of a byte first

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [num_rows, vocab_size] float32 to -inf for each token that a mask forbids."""
        # Eight tokens at a time: a table is 50 times as fast as shifts, and has the eight offsets of each byte.
        offsets = embedding(self.bits.int(), _offsets_of_bytes(logits.device))  # [num_masks, mask_bytes, 8]
        offsets = offsets.view(len(self.rows), -1)[:, : logits.shape[1]]
        if offsets.shape[1] < logits.shape[1]:  # Rows of the head beyond the vocabulary are no tokens.
            offsets = pad(offsets, (0, logits.shape[1] - offsets.shape[1]), value=float("-inf"))
        # The rows are distinct, so this is the sum of `index_add_`, whose order of additions could depend on the batch.
        logits.index_copy_(0, self.rows, logits.index_select(0, self.rows) + offsets)


@dataclass(frozen=True, slots=True)
class MaskMessage:
    """Masks of some rows of a step, which are known later than the rest of the step."""

    rows: np.ndarray  # [num_masks] int64: the constrained rows
    bits: np.ndarray  # [num_masks, mask_bytes] uint8: see `RowMasks`

    def place(self, device: torch.device) -> RowMasks:
        """Begin to copy the masks to `device`."""
        return RowMasks(*(begin_copy(torch.from_numpy(numbers), device) for numbers in (self.rows, self.bits)))


@cache
def _offsets_of_bytes(device: torch.device) -> Tensor:
    """Return the offsets [256, 8] float32 that each byte of a mask stands for: 0 for a bit that is set, else -inf."""
    # Made on the device: a copy from the host would let the first step with a mask wait.
    is_set = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(is_set == 0, float("-inf"))


class MaskThreads:
    """Threads that fill token masks. Constraints release the GIL, so the threads run at the same time.

    Invariant: of each constraint at most one thread fills a mask.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._mask_bytes = -(-vocab_size // 32) * 4
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, "masks")
        self._filling: list[Future[None]] = []

    def settle(self) -> None:
        """Wait for all threads. Those of a step that failed may still fill masks when its sequences go on."""
        if self._filling:
            wait(self._filling)
            self._filling.clear()

    def masks_of(self, columns: BatchColumns) -> PendingMasks | None:
        """Return the masks of the items that may not take every token, all of which sample; None if there are none.

        They are filled from now on, or from `message` on if a token before them is not known yet.
        """
        rows = [row for row in columns.special if _has_mask(columns.sequences[row])]
        if not rows:
            return None
        sequences = [columns.sequences[row] for row in rows]
        masks = PendingMasks(self, sequences, rows)
        if all(sequence.num_placeholder_tokens == 0 for sequence in sequences):
            masks.start()
        return masks

    def fill(self, sequences: Items[Sequence]) -> tuple[np.ndarray, list[Future[None]]]:
        """Begin to fill masks [num_sequences, mask_bytes] uint8; return them and the work of the threads."""
        masks = np.full((len(sequences), self._mask_bytes), 0xFF, np.uint8)
        share = -(-len(sequences) // self._num_threads)
        parts = [range(first, min(first + share, len(sequences))) for first in range(0, len(sequences), share)]
        work = [self._executor.submit(_fill, masks, sequences, part) for part in parts]
        self._filling += work
        return masks, work


class PendingMasks:
    """Masks of a step's constrained rows, while they are filled."""

    def __init__(self, threads: MaskThreads, sequences: Items[Sequence], rows: list[int]) -> None:
        self._threads = threads
        self._sequences = sequences
        self._rows = rows
        self._filling: tuple[np.ndarray, list[Future[None]]] | None = None

    def start(self) -> None:
        """Begin to fill the masks. All tokens of the sequences are known."""
        self._filling = self._threads.fill(self._sequences)

    def message(self) -> MaskMessage:
        """Wait until the masks are filled, and return them."""
        if self._filling is None:
            self.start()
        assert self._filling is not None
        masks, work = self._filling
        for part in work:
            part.result()
        return MaskMessage(np.array(self._rows), masks)


def _fill(masks: np.ndarray, sequences: Items[Sequence], rows: range) -> None:
    for row in rows:
        sequence = sequences[row]
        # A sequence that has ended since the step was scheduled needs no mask: its token is dropped.
        if sequence.status is SequenceStatus.FINISHED:
            continue
        if sequence.constraint is not None:
            sequence.constraint.fill_mask(masks[row].data)
        if sequence.request.params.allowed_token_ids:
            masks[row] &= _bits(sequence.request.params.allowed_token_ids, masks.shape[1])


def _has_mask(sequence: Sequence) -> bool:
    return sequence.constraint is not None or bool(sequence.request.params.allowed_token_ids)


@lru_cache(maxsize=64)
def _bits(token_ids: tuple[int, ...], mask_bytes: int) -> np.ndarray:
    """Return a mask [mask_bytes] uint8 with the bits of these tokens."""
    bits = np.zeros(mask_bytes * 8, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")
