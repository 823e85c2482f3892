"""A token that a step is to choose."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DueToken:
    """The next output token of `sequence`, number `index` from 0.

    Tokens before it may be known to the device alone; not where the sequence `needs_known_tokens`.
    """

    sequence: Sequence
    index: int
