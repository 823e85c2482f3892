"""Messages by which the first rank tells the others to run steps, and their form in the ring."""

from __future__ import annotations

import pickle
import struct
from typing import NamedTuple

import numpy as np

from replicas.model.cuda_graphs.padding import PaddedPlan
from replicas.model.planner import FlatPass, StepMessage
from replicas.model.sampling.masks import MaskMessage
from replicas.model.sampling.sampler import SamplingPlan

_HEAD = struct.Struct("<qqqq")
"""Number of the step, 1 if the message samples, its new blocks, and bytes of the structure, which is next; 0: it is
that of the message before. Then come the words."""
_MOST_REMEMBERED = 4096


class RankMessage(NamedTuple):
    """Message to run a step, to sample it, or both."""

    number: int
    step: StepMessage | None
    """None: the step was launched by the message before."""
    samples: bool
    """False: the masks with which the step samples are known later, and come in a message of their own."""
    masks: MaskMessage | None = None


class _Structure(NamedTuple):
    """Message without its numbers."""

    padded: PaddedPlan | None
    flat: tuple[FlatPass, ...]
    sampling: SamplingPlan | None
    masks: MaskMessage | None
    is_step: bool = True

    @property
    def recurs(self) -> bool:
        """True if there are few different ones: plans of padded passes and of sampling depend on lengths alone."""
        return not self.flat and self.masks is None


class MessageForm:
    """Form of messages as bytes: a head, a pickled structure, and the step's words as they are.

    Structures that recur are pickled once and read once, since that takes longer than all the rest, and are not sent
    twice in a row.
    """

    def __init__(self) -> None:
        self._pickled: dict[_Structure, bytes] = {}
        self._structures: dict[bytes, _Structure] = {}
        self._last: _Structure | None = None
        """Structure of the last message, if it recurs."""

    def to_bytes(self, message: RankMessage) -> bytes:
        """Return the message as bytes."""
        number, step, samples, masks = message
        if step is None:
            structure, words, num_new_blocks = _Structure(None, (), None, masks, is_step=False), b"", 0
        else:
            structure = _Structure(step.padded, step.flat, step.sampling, masks)
            words, num_new_blocks = step.words.tobytes(), step.num_new_blocks
        if masks is None and structure == self._last:
            pickled = b""
        elif structure.recurs:
            pickled, self._last = self._bytes_of(structure), structure
        else:
            pickled, self._last = _pickled(structure), None
        return _HEAD.pack(number, samples, num_new_blocks, len(pickled)) + pickled + words

    def of_bytes(self, data: bytearray) -> RankMessage:
        """Return the message that `to_bytes` has made `data` of, after all messages before it. It keeps `data`."""
        number, samples, num_new_blocks, size = _HEAD.unpack_from(data)
        end = _HEAD.size + size
        found = self._structure_of(bytes(data[_HEAD.size : end])) if size else self._last
        assert found is not None, "no structure came before"
        self._last = found if found.recurs else None
        step = None
        if found.is_step:
            words = np.frombuffer(data, np.int64, offset=end)
            step = StepMessage(words, num_new_blocks, found.padded, found.flat, found.sampling)
        return RankMessage(number, step, bool(samples), found.masks)

    def _bytes_of(self, structure: _Structure) -> bytes:
        pickled = self._pickled.get(structure)
        if pickled is None:
            if len(self._pickled) >= _MOST_REMEMBERED:
                self._pickled.clear()
            pickled = self._pickled[structure] = _pickled(structure)
        return pickled

    def _structure_of(self, data: bytes) -> _Structure:
        structure = self._structures.get(data)
        if structure is None:
            structure = pickle.loads(data)
            assert isinstance(structure, _Structure)
            if structure.recurs:
                if len(self._structures) >= _MOST_REMEMBERED:
                    self._structures.clear()
                self._structures[data] = structure
        return structure


def _pickled(structure: _Structure) -> bytes:
    """Return the pickled structure with zeros after it, so that the words begin at a multiple of their size."""
    pickled = pickle.dumps(structure, pickle.HIGHEST_PROTOCOL)
    return pickled + bytes(-len(pickled) % 8)
