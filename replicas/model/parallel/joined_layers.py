"""Layers of one rank whose results are joined with those of the other ranks."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.model.layers.ops import with_unknown_as_nan
from replicas.model.parallel.rank_group import RankGroup

_SUMMED = frozenset({"o_proj", "out_proj", "down_proj", "experts", "output", "down"})
"""Names of the layers whose inputs are cut, and whose results are added up.

They are those of transformers' layers, of `FusedLayer` and of `GatedDeltaNet`.
"""


class SummedLayer(nn.Module):
    """Layer of which each rank has a part of the inputs: the result is the sum of the ranks' results."""

    def __init__(self, part: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.part = part
        self._group = group

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the sum of the parts' results for the same inputs."""
        return self._group.sum(self.part(*inputs))


class CutEmbedding(nn.Module):
    """Token embedding of which each rank has a range of the rows. An id outside the vocabulary gets NaN."""

    def __init__(self, part: nn.Module, group: RankGroup, vocab_size: int) -> None:
        """`part` has the rows of this rank's range of `vocab_size` tokens."""
        super().__init__()
        self.part = part
        self._group = group
        self._vocab_size = vocab_size

    @property
    def weight(self) -> Tensor:
        """Rows of this rank, [num_rows, size]."""
        weight = self.part.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of `token_ids` [...] int64, [..., size]."""
        num_rows = len(self.weight)
        rows = token_ids - self._group.share.rank * num_rows
        own = rows.clamp(0, num_rows - 1)
        embeddings = self.part(own).masked_fill((rows != own)[..., None], 0.0)
        return with_unknown_as_nan(self._group.sum(embeddings), token_ids == token_ids.clamp(0, self._vocab_size - 1))


def join_layers(model: PreTrainedModel, group: RankGroup, vocab_size: int) -> None:
    """Join the layers of a rank's part of a model, whose modules are final, with those of the other ranks."""
    embedding = model.get_input_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in _SUMMED:
                setattr(parent, name, SummedLayer(child, group))
            elif child is embedding:
                setattr(parent, name, CutEmbedding(child, group, vocab_size))
