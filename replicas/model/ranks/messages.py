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

_HEAD = struct.Struct("<qqq")
"""Number of the step, 1 if the message samples, and bytes of the structure, which is next. Then come the words."""
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

    is_step: bool
    padded: PaddedPlan | None
    flat: tuple[FlatPass, ...]
    sampling: SamplingPlan | None
    masks: MaskMessage | None

    @property
    def recurs(self) -> bool:
        """True if there are few different ones: plans of padded passes and of sampling depend on lengths alone."""
        return not self.flat and self.masks is None


class MessageForm:
    """Form of messages as bytes: a head, a pickled structure, and the step's words as they are.

    Structures that recur are pickled once and read once: that takes longer than all the rest.
    """

    def __init__(self) -> None:
        self._pickled: dict[_Structure, bytes] = {}
        self._structures: dict[bytes, _Structure] = {}

    def to_bytes(self, message: RankMessage) -> bytes:
        """Return the message as bytes."""
        step = message.step
        words: bytes | memoryview = b""
        if step is None:
            structure = _Structure(False, None, (), None, message.masks)
        else:
            structure, words = _Structure(True, step.padded, step.flat, step.sampling, message.masks), step.words.data
        pickled = self._bytes_of(structure)
        return b"".join((_HEAD.pack(message.number, message.samples, len(pickled)), pickled, words))

    def of_bytes(self, data: bytes) -> RankMessage:
        """Return the message that `to_bytes` has made `data` of."""
        number, samples, size = _HEAD.unpack_from(data)
        end = _HEAD.size + size
        found = self._structure_of(data[_HEAD.size : end])
        step = None
        if found.is_step:
            words = np.frombuffer(data, np.int64, offset=end).copy()  # Numbers of bytes cannot be written.
            step = StepMessage(words, found.padded, found.flat, found.sampling)
        return RankMessage(number, step, bool(samples), found.masks)

    def _bytes_of(self, structure: _Structure) -> bytes:
        if not structure.recurs:
            return pickle.dumps(structure, pickle.HIGHEST_PROTOCOL)
        pickled = self._pickled.get(structure)
        if pickled is None:
            if len(self._pickled) >= _MOST_REMEMBERED:
                self._pickled.clear()
            pickled = self._pickled[structure] = pickle.dumps(structure, pickle.HIGHEST_PROTOCOL)
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
