"""Tap before a model's output layer, which takes the hidden states that are pooled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(slots=True)
class TakenStates:
    """Hidden states that a tap takes in one forward pass."""

    num_rows: int
    """Number of the first rows that are taken and do not reach the output layer."""
    states: Tensor | None = None
    """[num_rows, hidden_size]; None: the pass has not run, or no row is taken."""


class HiddenTap:
    """Tap before a model's output layer: it takes the first rows of a forward pass, the layer computes the others.

    What it takes are the states after the final norm. Their logits, which are far larger, are never computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Make the tap, and put it in front of the output layer of `model`."""
        self._taken: TakenStates | None = None
        layer = model.get_output_embeddings()
        assert isinstance(layer, nn.Module), "a decoder has an output layer"
        layer.register_forward_pre_hook(self._take)

    @contextmanager
    def taken(self, num_rows: int) -> Iterator[TakenStates]:
        """Take the first `num_rows` rows of the forward pass in this context; the states are in the yielded object."""
        taken = TakenStates(num_rows)
        self._taken = taken if num_rows else None
        try:
            yield taken
        finally:
            self._taken = None

    def _take(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        taken = self._taken
        if taken is None:
            return None
        hidden: Tensor = args[0]  # [1, num_rows + num_logits_rows, hidden_size]
        taken.states = hidden[0, : taken.num_rows]
        return (hidden[:, taken.num_rows :], *args[1:])
