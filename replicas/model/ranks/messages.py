"""Messages by which the first rank tells the others to run steps, and their form in the ring."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter, methodcaller
from typing import Any

from replicas.model.planner import StepMessage
from replicas.model.sampling.masks import MaskMessage


@dataclass(frozen=True, slots=True)
class RankMessage:
    """Message to run a step, to sample it, or both."""

    number: int
    step: StepMessage | None
    """None: the step was launched by the message before."""
    samples: bool
    """False: the masks with which the step samples are known later, and come in a message of their own."""
    masks: MaskMessage | None = None

    def to_bytes(self) -> bytes:
        """Return the message as bytes."""
        file = io.BytesIO()
        _MessagePickler(file, pickle.HIGHEST_PROTOCOL).dump(self)
        return file.getvalue()

    @classmethod
    def of_bytes(cls, data: bytes) -> RankMessage:
        """Return the message that `to_bytes` has made `data` of."""
        message = pickle.loads(data)
        assert isinstance(message, cls)
        return message


class _Reductions(dict[type, Callable[[Any], Any]]):
    """Reductions of objects by their type: of dataclasses to the values of their fields, without looking them up."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):
            raise KeyError(kind)  # Classes are pickled by their names.
        reduction = self[kind] = _reduction(kind)
        return reduction


def _reduction(kind: type) -> Callable[[Any], Any]:
    if not is_dataclass(kind):
        return methodcaller("__reduce_ex__", pickle.HIGHEST_PROTOCOL)
    names = [field.name for field in fields(kind)]
    assert len(names) > 1, "a getter of one name returns no tuple"
    values = attrgetter(*names)
    return lambda found: (kind, values(found))


class _MessagePickler(pickle.Pickler):
    dispatch_table = _Reductions()
