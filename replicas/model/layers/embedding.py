"""Guarded token embedding for a GPU, where a read outside the table would end the process."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.layers.ops import LayerOps, with_unknown_as_nan


class GuardedEmbedding(nn.Module):
    """Token embedding that reads nothing outside its table.

    An id outside gets NaN, which its own sequence alone carries to its logits, so that the sequence fails. The host
    checks every id before; this holds if it errs, or if the device makes the id.
    """

    def __init__(self, original: nn.Embedding, ops: LayerOps) -> None:
        super().__init__()
        self._original = original
        self._ops = ops
        self._is_plain = type(original) is nn.Embedding

    @property
    def weight(self) -> Tensor:
        """Table of the embeddings, [vocab_size, size]."""
        return self._original.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of `token_ids` [...] int64, [..., size]."""
        if self._is_plain:
            return self._ops.embed(token_ids.reshape(-1), self.weight).view(*token_ids.shape, -1)
        known = token_ids.clamp(0, len(self.weight) - 1)  # A subclass also scales.
        return with_unknown_as_nan(self._original(known), token_ids == known)


def guard_embedding(model: PreTrainedModel, ops: LayerOps) -> None:
    """Replace the token embedding of `model` by a guarded one."""
    model.set_input_embeddings(GuardedEmbedding(model.get_input_embeddings(), ops))
