"""The parts of a model: what each rank holds of its weights, in numbers and in memory."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from replicas.model.diagnosis import memory_of
from replicas.model.loading.config import read_config
from replicas.model.parallel.shares import ModelCuts, Share
from testkit.model.rank_threads import load_parts
from testkit.model.tiny_checkpoints import tiny_config, write_checkpoint

OF_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False, max_position_embeddings=8192,
)  # fmt: skip
OF_1B = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
PLANNED_DIMS = {"colwise": 0, "rowwise": 1}
WITH_PLAN = ("llama", "mistral-window", "qwen2", "qwen3", "gemma", "gemma2-window", "gemma3_text-window", "qwen3_moe")


@pytest.mark.parametrize("config", [OF_8B, OF_1B], ids=["8B", "tied 1B"])
def test_each_of_two_ranks_has_half_of_the_memory(config: LlamaConfig) -> None:
    whole, part = (memory_of(config, torch.bfloat16, num_ranks) for num_ranks in (1, 2))
    assert part.num_values <= 0.5 * 1.05 * whole.num_values
    assert part.kv_bytes_per_token * 2 == whole.kv_bytes_per_token


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_memory_of_a_rank_is_the_predicted_one(tmp_path: Path, is_tied: bool) -> None:
    path = write_checkpoint(tmp_path, with_tokenizer=False, tie_word_embeddings=is_tied, vocab_size=509)
    predicted = memory_of(read_config(str(path)), torch.float32, 2)
    for part in load_parts(path, 2):
        # Linear layers are packed, so their numbers are counted by the sizes of the modules.
        sizes = {id(module): module for module in part.model.modules() if hasattr(module, "in_features")}
        linear = sum(module.in_features * module.out_features for module in sizes.values())
        others = sum(parameter.numel() for parameter in part.model.parameters())
        norms = sum(2 * 64 for _ in range(3)) + 64
        copies = 255 * 64 if is_tied else 0  # The output layer's packed copy of the embedding.
        assert predicted.num_values == linear + others + norms - copies
        [layer, *_] = part.layers
        assert predicted.kv_bytes_per_token == 3 * layer.num_numbers * 4


@pytest.mark.parametrize("architecture", WITH_PLAN)
def test_linear_layers_are_cut_where_transformers_cuts_them(architecture: str) -> None:
    config = tiny_config(architecture)
    cuts = ModelCuts(config, Share(1, 2))
    plan = type(config).base_model_tp_plan
    checked = 0
    for name, kind in plan.items():
        if kind in PLANNED_DIMS and "experts" not in name:
            cut = cuts.cut(f"model.{name.replace('*', '0')}.weight", (64, 64))
            assert cut is not None and cut.dim == PLANNED_DIMS[kind], name
            checked += 1
    assert checked >= 7


def test_a_rank_holds_the_kv_heads_of_its_query_heads() -> None:
    config = CONFIG_MAPPING["llama"](hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    for rank, first in enumerate((0, 0, 8, 8)):
        cut = ModelCuts(config, Share(rank, 4)).cut("model.layers.0.self_attn.k_proj.weight", (16, 64))
        assert cut is not None and cut.ranges == (range(first, first + 8),)
