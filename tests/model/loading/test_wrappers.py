"""The text part of checkpoints of text and images: it is served alone, and nothing else of them is read or kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from replicas.engine.config import EngineLimits
from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.kv_cache import KVCache, bytes_per_block
from replicas.model.checkpoint import lazy_weights
from replicas.model.diagnosis import memory_of
from replicas.model.loading.check_model import check_model
from replicas.model.loading.config import read_config
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import longest_of
from replicas.model.loading.memory import replica_memory
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    check_equals_generate,
    load,
    load_compiled,
    num_preemptions,
    random_prompts,
    reference_tokens,
    requests_for,
    run,
    tokens,
)
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.tiny_checkpoints import tiny_config, write_checkpoint
from testkit.model.tiny_wrappers import WRAPPERS, write_wrapper

pytestmark = pytest.mark.rotated

DAILY = ("gemma3", "gemma4-shared", "mistral3", "qwen2_vl", "qwen3_vl", "smolvlm")
NUM_OUTPUT_TOKENS = 12
PROMPTS = random_prompts((5, 33, 60))
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
TOWERS = ("vision", "visual", "projector", "connector", "image_newline")


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors whose values were read from files."""
    names: list[str] = []

    class CountingFile:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(lazy_weights, "safe_open", CountingFile)
    return names


def stored_names(path: Path) -> set[str]:
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def is_of_tower(name: str) -> bool:
    return any(tower in name for tower in TOWERS)


def check_outputs(loaded: LoadedModel, expected: list[list[int]]) -> None:
    """Check greedy tokens of a chunked batch, of prefix hits and of preempted sequences."""
    engine = build_engine(loaded)
    cold, warm = (run(engine, requests_for(PROMPTS, GREEDY)) for _ in range(2))
    assert [list(output.token_ids) for output in cold] == expected
    assert [list(output.token_ids) for output in warm] == expected
    assert [output.usage.cached_tokens for output in warm] == [0, 32, 48]
    tight = build_engine(loaded, Sizes(num_blocks=28, block_size=4))
    assert tokens(tight, PROMPTS, GREEDY) == expected
    assert num_preemptions(tight) > 0


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.deep) for name in WRAPPERS]
)
def test_text_part_gives_the_tokens_of_generate_and_no_tower_is_read(
    tmp_path: Path, read_names: list[str], name: str
) -> None:
    whole = write_wrapper(tmp_path, name)
    expected = reference_tokens(whole, PROMPTS, NUM_OUTPUT_TOKENS)
    assert len({token for output in expected for token in output}) >= 20
    loaded = load(tmp_path)
    assert set(read_names) == {name for name in stored_names(tmp_path) if not is_of_tower(name)}
    assert not any(is_of_tower(name) for name, _ in loaded.model.named_modules())
    assert loaded.max_model_len == 256
    check_outputs(loaded, expected)


def test_gemma_3n_under_the_names_of_its_wrapper(tmp_path: Path, read_names: list[str]) -> None:
    # The class with towers needs the package timm, so the text class makes the weights.
    text = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "text", "gemma3n_text-shared"))
    expected = reference_tokens(text.float().eval(), PROMPTS, NUM_OUTPUT_TOKENS)
    weights = {name.replace("model.", "model.language_model."): weight for name, weight in text.state_dict().items()}
    weights["model.vision_tower.blocks.0.weight"] = torch.ones(2)
    config = CONFIG_MAPPING["gemma3n"](text_config=text.config.to_dict(), tie_word_embeddings=False)
    config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path)
    assert not any(is_of_tower(name) for name in read_names)
    check_outputs(loaded, expected)


def test_a_quantized_text_part_keeps_its_bits(tmp_path: Path) -> None:
    need_kernels()
    text = quantize_checkpoint(cached_checkpoint("llama"), tmp_path, METHODS["compressed-tensors W4A16"])
    weights = {f"language_model.{name}": weight for name, weight in load_file(text / "model.safetensors").items()}
    weights["vision_tower.weight"] = torch.ones(2, dtype=torch.int8)  # Without scales: read, it would be refused.
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((text / "config.json").read_text())
    whole = {"model_type": "llava", "text_config": config, "tie_word_embeddings": False}
    whole["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    loaded = load_compiled(tmp_path)
    assert "kept in 4 bits" in loaded.weights
    check_equals_generate(
        build_engine(loaded, attention=CppAttention), text.parent / "dense", PROMPTS, NUM_OUTPUT_TOKENS
    )


@pytest.mark.parametrize("architecture", ["gemma3n_text-shared", "gemma4_text-shared"])
def test_a_layer_that_uses_another_ones_keys_has_no_cache(architecture: str) -> None:
    path = cached_checkpoint(architecture)
    loaded = load(path)
    assert [layer.kv_source for layer in loaded.layers] == [None, None, None, 1, 1, 2]
    cache = KVCache(loaded.layers, 4, 16, torch.float32, torch.device("cpu"))
    assert all(cache[index] is cache[source] for index, source in ((3, 1), (4, 1), (5, 2)))
    token_bytes = sum(2 * 4 * layer.num_kv_heads * layer.key_size for layer in loaded.layers[:3])
    assert bytes_per_block(loaded.layers, 16, torch.float32) == 16 * token_bytes
    assert check_model(path).kv_numbers == token_bytes // 4
    assert memory_of(read_config(str(path)), torch.float32).kv_bytes_per_token == token_bytes


def test_memory_is_that_of_the_text_part(tmp_path: Path) -> None:
    whole = write_wrapper(tmp_path, "qwen3_vl")
    options = ModelOptions(str(tmp_path), dtype="float32", kernel_cache_dir=None)
    predicted = replica_memory(tmp_path, options, RunnerOptions(), EngineLimits())
    num_weights = sum(weight.numel() for name, weight in whole.named_parameters() if not is_of_tower(name))
    packed_output_layer = whole.get_input_embeddings().weight.numel()
    assert predicted.weights == 4 * (num_weights + packed_output_layer)
    assert check_model(tmp_path).longest == 512


def test_position_encoding_of_one_type_of_layers_bounds_the_length() -> None:
    config = tiny_config("gemma3_text-window")
    config.rope_parameters["full_attention"] |= {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert longest_of(config) == 128
