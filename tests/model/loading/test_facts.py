"""Facts that the check by transformers finds without values are those of the loaded model."""

from pathlib import Path

import pytest

from replicas.engine.config import EngineLimits, sequence_blocks
from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.attention.layer_groups import bytes_of_block
from replicas.model.build import build_runner
from replicas.model.hardware.device import choose_cache_dtype
from replicas.model.loading.check_model import check_model
from replicas.model.loading.facts import ModelFacts, choose_max_model_len
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import KVCacheDtype, ModelOptions, RunnerOptions
from testkit.model.tiny_checkpoints import REFUSED, tiny_tokenizer, write_checkpoint, write_refused_checkpoint

LIMITS = EngineLimits(max_num_seqs=2, max_num_batched_tokens=16)


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2-window", "gemma4_text-shared", "mistral-window", "qwen3_moe", "deepseek_v3"]
)
def test_the_smallest_cache_is_that_of_the_replica(
    tmp_path: Path, architecture: str, cache_dtype: KVCacheDtype
) -> None:
    model = write_checkpoint(tmp_path / "model", architecture)
    facts = ModelFacts.read(check_model(model).write())
    options = ModelOptions(str(model), "float32", "cpu", max_model_len=100, kernel_cache_dir=None)
    loaded = load_model(options)
    assert facts.longest == 512
    groups = loaded.layer_groups(choose_cache_dtype(cache_dtype, loaded.dtype))
    block_bytes = bytes_of_block(groups, LIMITS.block_size, choose_cache_dtype(cache_dtype, loaded.dtype))
    # 7 blocks and the scratch block; in tables with a window of 24 tokens, 4.
    num_bytes = (1 + sum(7 if group.window is None else 4 for group in groups)) * block_bytes
    enough = RunnerOptions(kv_cache_bytes=num_bytes, kv_cache_dtype=cache_dtype)
    facts.check_cache(options, enough, LIMITS)
    runner = build_runner(loaded, LIMITS, enough)
    assert sequence_blocks(LIMITS, runner.windows, is_asynchronous=False).num_tokens(runner.num_blocks) >= 100
    too_small = RunnerOptions(kv_cache_bytes=num_bytes - 1, kv_cache_dtype=cache_dtype)
    with pytest.raises(ModelLoadError, match=rf"max_model_len \(100 tokens\) needs {num_bytes} bytes"):
        facts.check_cache(options, too_small, LIMITS)


def test_a_model_whose_code_needs_values_has_no_known_cache(tmp_path: Path) -> None:
    facts = check_model(write_checkpoint(tmp_path / "model", "gpt2"))
    assert (facts.longest, facts.kv_numbers) == (512, None)
    facts.check_cache(ModelOptions("model"), RunnerOptions(kv_cache_bytes=1), LIMITS)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_served_is_refused_before_any_value_is_read(tmp_path: Path, model_type: str) -> None:
    model = write_refused_checkpoint(tmp_path / "model", model_type)
    tiny_tokenizer().save_pretrained(model)
    with pytest.raises(UnsupportedModel, match=REFUSED[model_type][1]):
        check_model(model)


@pytest.mark.parametrize(
    ("longest", "asked", "result"),
    [(512, None, 512), (512, 512, 512), (None, 9000, 9000), (512, 513, "at most 512"), (512, 1, "at least 2"),
     (None, None, "set max_model_len")],
)  # fmt: skip
def test_the_length_is_within_the_position_encoding(longest: int | None, asked: int | None, result: int | str) -> None:
    if isinstance(result, int):
        assert choose_max_model_len(longest, asked) == result
        return
    with pytest.raises(ModelLoadError, match=result):
        choose_max_model_len(longest, asked)
