"""Ranks hold the parts of quantized and of rounded weights that one process has, bit by bit, and give its tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.formats import Weights
from replicas.model.checkpoint.lazy_weights import WeightReader, cut_tensor
from replicas.model.checkpoint.weight_parts import cut_weights
from replicas.model.loading.checks import read_weights
from replicas.model.loading.config import read_config
from replicas.model.loading.gguf import convert
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR, Quantization
from replicas.model.parallel.shares import ModelCuts, Share
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    build_engine,
    load,
    load_compiled,
    random_prompts,
    reference_model,
    reference_tokens,
    tokens,
)
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.rank_threads import following, load_parts
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.model.tiny_gguf import write_gguf

pytestmark = pytest.mark.rotated

NUM_OUTPUT_TOKENS = 16
PROMPTS = random_prompts((5, 40))
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
ORDERED = ("compressed-tensors W4A16 ordered", "GPTQ desc_act")
KEPT = {"compressed-tensors W4A16 asymmetric": 4, "compressed-tensors W8A8": 8, "AWQ": 4, "GPTQ": 4}
"""Formats whose bits the compiled kernels keep, and the bits."""


def write(name: str, directory: Path) -> Path:
    method = METHODS[name]
    return quantize_checkpoint(cached_checkpoint(method.architecture), directory, method)


def cuts_of(path: Path, rank: int, num_ranks: int) -> ModelCuts:
    return ModelCuts(read_config(str(path)), Share(rank, num_ranks))


def check_parts(path: Path, num_ranks: int) -> list[Weights]:
    """Check that each rank reads what cutting the dense weights gives; return what each has."""
    whole, parts = read_weights(path), []
    expected = {name: weight[...] for name, weight in WeightReader(whole, torch.float32).lazy().items()}
    for rank in range(num_ranks):
        cuts = cuts_of(path, rank, num_ranks)
        part = cut_weights(whole, cuts.cut, num_ranks)
        for name, weight in WeightReader(part, torch.float32).lazy().items():
            cut, found = cuts.cut(name, expected[name].shape), weight[...]
            assert found.shape == part.shape_of(name)
            assert torch.equal(found, expected[name] if cut is None else cut_tensor(expected[name], cut)), name
        parts.append(part)
    return parts


@pytest.mark.sampled(6)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ORDERED])
def test_a_rank_reads_its_part_of_each_weight(tmp_path: Path, name: str, num_ranks: int) -> None:
    """With four ranks, cuts go through groups of scales and blocks."""
    first, *others = check_parts(write(name, tmp_path), num_ranks)
    for other in others:  # The ranks choose the same kernels, which depend on these sizes.
        assert {name: weight.layout for name, weight in first.quantized.items()} == {
            name: weight.layout for name, weight in other.quantized.items()
        }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["AWQ", "compressed-tensors W4A16 asymmetric", "FP8 blocks of DeepSeek"])
@pytest.mark.parametrize("architecture", ["phi3", "qwen3_5_text"])
def test_a_rank_reads_its_part_of_joined_layers(tmp_path: Path, architecture: str, name: str) -> None:
    """Queries, keys and values are parts of one weight, each of which is cut."""
    check_parts(quantize_checkpoint(cached_checkpoint(architecture), tmp_path, METHODS[name]), 2)


@pytest.mark.parametrize("name", ["compressed-tensors W8A8", "FP8 blocks of DeepSeek"])
def test_the_last_ranks_part_of_the_vocabulary_ends_with_zeros(tmp_path: Path, name: str) -> None:
    plain = write_checkpoint(tmp_path / "plain", with_tokenizer=False, tie_word_embeddings=False, vocab_size=509)
    method = replace(METHODS[name], is_quantized=lambda name: name == "lm_head.weight")
    check_parts(quantize_checkpoint(plain, tmp_path, method), 4)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.IQ4_NL])
def test_a_rank_reads_its_part_of_a_gguf_file(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """The cuts go through the file's blocks of 256 values."""
    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 8,
    }  # fmt: skip
    (tmp_path / "converted").mkdir()
    file = write_gguf(tmp_path / "tiny.gguf", write_checkpoint(tmp_path / "plain", **sizes), kind)
    convert(file, tmp_path / "converted")
    parts = check_parts(tmp_path / "converted", 2)
    assert all(len(part.quantized) == 21 for part in parts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["AWQ", "FP8 blocks of DeepSeek", "FP8 per tensor", "MXFP4", "NVFP4 of modelopt"])
def test_ranks_give_the_tokens_of_the_dequantized_model(tmp_path: Path, name: str, num_ranks: int) -> None:
    path = write(name, tmp_path)
    expected = reference_tokens(reference_model(path.parent / "dense"), PROMPTS, NUM_OUTPUT_TOKENS)
    with following(load_parts(path, num_ranks)) as ranks:
        assert tokens(ranks.engine(), PROMPTS, GREEDY) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", KEPT)
def test_ranks_keep_the_bits_of_their_parts(tmp_path: Path, name: str, num_ranks: int) -> None:
    need_kernels()
    path = write(name, tmp_path)
    parts = load_parts(path, num_ranks, kernel_cache_dir=DEFAULT_KERNEL_CACHE_DIR)
    whole = num_packed_bytes(load_compiled(path))
    for part in parts:
        assert part.weights.endswith(f"kept in {KEPT[name]} bits" if KEPT[name] == 4 else "not 8-bit int")
        assert 0 < num_packed_bytes(part) <= 1.3 * whole / min(num_ranks, 2)
    expected = reference_tokens(reference_model(path.parent / "dense"), PROMPTS, NUM_OUTPUT_TOKENS)
    with following(parts) as ranks:
        assert tokens(ranks.engine(), PROMPTS, GREEDY) == expected


def num_packed_bytes(loaded: LoadedModel) -> int:
    grouped = [module for module in loaded.model.modules() if type(module).__name__ == "GroupedLinear"]
    return sum(tensor.nbytes for module in grouped for tensor in module.parameters())


@pytest.mark.parametrize("name", ORDERED)
def test_inputs_in_another_order_are_not_cut(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    with pytest.raises(ModelLoadError, match=r"is 2, which cuts the inputs of model\S+; .* with which only 1 works"):
        cut_weights(read_weights(path), cuts_of(path, 1, 2).cut, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("architecture", "quantization"), [("llama", "fp8"), ("mixtral", "fp8"), ("qwen3", "int4"), ("llama", "int8")]
)
def test_weights_are_rounded_as_in_one_process(architecture: str, quantization: Quantization) -> None:
    """The largest number of a row, from which its scale follows, may be that of another rank."""
    path = cached_checkpoint(architecture)
    if quantization == "fp8":
        one, kernels = load(path, quantization=quantization), None
    else:
        need_kernels()
        one, kernels = load_compiled(path, quantization=quantization), DEFAULT_KERNEL_CACHE_DIR
    parts = load_parts(path, 2, quantization=quantization, kernel_cache_dir=kernels)
    for name, module in one.model.named_modules():
        if name.endswith((".down", ".down_proj", ".output", ".o_proj")):
            expected = weight_of(module)
            found = [weight_of(part.model.get_submodule(name).part) for part in parts]
            assert torch.equal(torch.cat(found, 1), expected), name
        if name.endswith(".experts"):
            found = [part.model.get_submodule(name).part.down_proj for part in parts]
            assert torch.equal(torch.cat(found, 2), module.down_proj)
    with following(parts) as ranks:
        assert tokens(ranks.engine(), PROMPTS, GREEDY) == tokens(build_engine(one), PROMPTS, GREEDY)


def weight_of(module: nn.Module) -> torch.Tensor:
    if type(module).__name__ == "Int8Linear":
        numbers, scales = module.numbers, module.scales
        assert isinstance(numbers, torch.Tensor) and isinstance(scales, torch.Tensor)
        return numbers.float() * scales[:, None]
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def test_rounding_that_a_cut_would_change_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, with_tokenizer=False, intermediate_size=96)
    with pytest.raises(ModelLoadError, match=r"is 2, which leaves 48 of the 96 inputs of .* 1, 3 would not"):
        load_parts(path, 2, quantization="fp8")
    with pytest.raises(ModelLoadError, match=r"'fp8_w8a8', which contradicts tensor_parallel_size .2.: .* fp8 rounds"):
        load_parts(path, 2, quantization="fp8_w8a8")
