"""A token id outside the table, which the host's check has missed, fails its own sequence and no other."""

import pytest
import torch
from torch import nn

from replicas.errors import SequenceFailed
from replicas.model.layers.embedding import GuardedEmbedding, guard_embedding
from replicas.model.layers.ops import TorchLayerOps
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import Sizes, build_engine, load_unoptimized, run

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


class ScaledEmbedding(nn.Embedding):
    """Embedding of a model that scales it, as Gemma's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3.0


@pytest.mark.parametrize("embedding", [nn.Embedding(10, 4), ScaledEmbedding(10, 4)])
def test_ids_outside_give_nan(embedding: nn.Embedding) -> None:
    guarded = GuardedEmbedding(embedding, TorchLayerOps())
    found = guarded(torch.tensor([[9, 10, 0], [-1, 3, 2**40]]))
    assert found.isnan().all(dim=-1).tolist() == [[False, True, False], [True, False, True]]
    assert torch.equal(found[0, [0, 2]], embedding(torch.tensor([9, 0])))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text-window", "mixtral"])
@pytest.mark.parametrize("budget", [70, 5])
def test_an_unknown_id_fails_its_sequence_alone(architecture: str, budget: int) -> None:
    loaded = load_unoptimized(cached_checkpoint(architecture, with_tokenizer=False))
    good = [GenerateRequest(f"good-{n}", tuple(range(3 + n, 20 + 2 * n)), PARAMS) for n in range(3)]
    sizes = Sizes(max_num_seqs=4, max_num_batched_tokens=budget)
    expected = run(build_engine(loaded, sizes), good)
    guard_embedding(loaded.model, TorchLayerOps())
    bad = GenerateRequest("bad", (5, 6, loaded.vocab_size, 7), PARAMS)
    *found, failed = run(build_engine(loaded, sizes, vocab_size=loaded.vocab_size + 1), [*good, bad])
    assert [delta.token_ids for delta in found] == [delta.token_ids for delta in expected]
    assert isinstance(failed.error, SequenceFailed) and "not finite" in failed.error.message
