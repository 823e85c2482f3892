"""Quantized checkpoints give the model of their dequantized weights; those that contradict themselves are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppAttention
from replicas.model.loading.checks import check_config, num_weights, read_weights
from replicas.model.loading.config import read_config
from replicas.model.loading.weights import load_weights
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    build_engine,
    check_equals_generate,
    load,
    load_compiled,
    log_probabilities,
    random_prompts,
    reference_model,
    requests_for,
    run,
)
from testkit.model.quantized_checkpoints import METHODS, Tensors, quantize_checkpoint

pytestmark = pytest.mark.rotated

KEPT = {
    "compressed-tensors W4A16 asymmetric": "4-bit, kept in 4 bits",
    "compressed-tensors W8A8": "8-bit, kept in 8 bits; activations stay in float32, not 8-bit int",
    "AWQ": "4-bit, kept in 4 bits",
    "GPTQ": "4-bit, kept in 4 bits",
    "GPTQ desc_act": "4-bit, dequantized to float32",
}
"""Formats, and the end of the words about what becomes of their weights."""
COARSE = 0.3
"""Error of weights in 3 bits, relative to their norm."""


def write(name: str, directory: Path) -> Path:
    method = METHODS[name]
    return quantize_checkpoint(cached_checkpoint(method.architecture), directory, method)


def weights_of(path: Path, dtype: torch.dtype) -> Tensors:
    return load_weights(str(path), read_config(str(path)), dtype).model.state_dict()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", METHODS)
def test_weights_are_those_that_the_format_describes(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    dense, plain = path.parent / "dense", cached_checkpoint(METHODS[name].architecture)
    expected, unquantized = weights_of(dense, torch.float32), weights_of(plain, torch.float32)
    errors = {
        each: ((expected[each] - unquantized[each]).norm() / unquantized[each].norm()).item() for each in expected
    }
    assert 0.001 < max(errors.values()) < COARSE, "the written checkpoint must be quantized, and well"
    for dtype, tolerance in ((torch.float32, 2e-7), (torch.bfloat16, 0)):
        found = weights_of(path, dtype)
        assert found.keys() == expected.keys()
        for each, weight in found.items():
            torch.testing.assert_close(weight, expected[each].to(weight.dtype), rtol=tolerance, atol=0)
    assert num_weights(path) == num_weights(dense)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["GPTQ desc_act", "FP8 blocks of DeepSeek", "MXFP4"])
def test_tokens_are_those_of_the_dequantized_model(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    check_equals_generate(build_engine(load(path)), path.parent / "dense", random_prompts((5, 40)), max_tokens=64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KEPT)
def test_weights_that_keep_their_bits_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    need_kernels()
    path = write(name, tmp_path)
    loaded = load_compiled(path)
    assert loaded.weights.endswith(KEPT[name])
    linears = [type(module).__name__ for module in loaded.model.modules()]
    assert linears.count("GroupedLinear") == (12 if "kept" in KEPT[name] else 0)
    engine = build_engine(loaded, attention=CppAttention)
    check_equals_generate(engine, path.parent / "dense", random_prompts((5, 40)), max_tokens=64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["compressed-tensors W8A8", "AWQ"])
def test_many_rows_in_bfloat16_err_by_its_rounding(tmp_path: Path, name: str) -> None:
    need_kernels()
    path = write(name, tmp_path)
    prompts = random_prompts((60, 7, 100))
    exact, own = (
        torch.stack([next_log_probabilities(reference_model(path.parent / "dense", dtype), each) for each in prompts])
        for dtype in (torch.float32, torch.bfloat16)
    )
    engine = build_engine(load_compiled(path, "bfloat16"), attention=CppAttention)
    outputs = run(engine, requests_for(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)))
    found = torch.stack([log_probabilities(output) for output in outputs])
    assert (found - exact).abs().mean() <= 2 * (own - exact).abs().mean()


def next_log_probabilities(model: torch.nn.Module, token_ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0, -1].float(), dim=-1)


def test_models_that_are_not_fused_keep_their_bits_too(tmp_path: Path) -> None:
    need_kernels()
    path = quantize_checkpoint(cached_checkpoint("olmo2"), tmp_path, METHODS["GPTQ"])
    loaded = load_compiled(path)
    assert loaded.weights == "GPTQ, 4-bit, kept in 4 bits"
    engine = build_engine(loaded, attention=CppAttention)
    check_equals_generate(engine, path.parent / "dense", random_prompts((5, 40)), max_tokens=32)


def test_experts_in_4_bits_are_dequantized(tmp_path: Path) -> None:
    need_kernels()
    path = quantize_checkpoint(cached_checkpoint("qwen3_moe"), tmp_path, METHODS["AWQ"])
    loaded = load_compiled(path)
    assert "kept in 4 bits, 36 of 48 dequantized to float32" in loaded.weights
    engine = build_engine(loaded, attention=CppAttention)
    check_equals_generate(engine, path.parent / "dense", random_prompts((5, 40)), max_tokens=32)


def test_the_model_says_what_became_of_its_weights(tmp_path: Path) -> None:
    assert load(write("AWQ", tmp_path / "4")).weights == "AWQ, 4-bit, dequantized to float32"
    quantized = load(write("compressed-tensors W8A8", tmp_path / "8")).weights
    assert quantized.endswith("8-bit, dequantized to float32; activations stay in float32, not 8-bit int")
    assert load(cached_checkpoint("llama")).weights == "float32"


Edit = Callable[[Tensors], object]


def without(name: str) -> Edit:
    return lambda tensors: tensors.pop(f"model.layers.1.mlp.up_proj.{name}")


def cut(name: str) -> Edit:
    full = f"model.layers.1.mlp.up_proj.{name}"
    return lambda tensors: tensors.update({full: tensors[full][:-1].contiguous()})


def wrong_shape(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.weight_shape"] = torch.tensor([128, 10**9])


def lose_a_group(tensors: Tensors) -> None:
    for name in ("scales", "qzeros"):
        cut(name)(tensors)


@pytest.mark.parametrize(
    ("method", "edit", "reason"),
    [
        ("compressed-tensors W4A16", without("weight_scale"), r"lacks its .*up_proj\.weight_scale"),
        ("compressed-tensors W4A16", cut("weight_scale"), r"weight_scale has the shape \[127, 2\]; expected"),
        ("compressed-tensors W4A16", wrong_shape, "words a row for 1000000000 inputs"),
        ("compressed-tensors W4A16 asymmetric", without("weight_zero_point"), "it lacks weight_zero_point"),
        ("compressed-tensors W8A8", without("weight_scale"), "neither weight_scale nor weight_scale_inv"),
        ("compressed-tensors FP8 blocks", cut("weight_scale"), "the scale has the shape"),
        ("AWQ", without("qzeros"), r"lacks its .*qzeros"),
        ("AWQ", cut("scales"), "qzeros has the shape"),
        ("GPTQ", cut("qzeros"), "qzeros has the shape"),
        ("GPTQ", cut("g_idx"), "qweight has 8 words for 63 inputs"),
        ("GPTQ", lose_a_group, "64 inputs in groups of 32 cannot have 1 scales"),
        ("bitsandbytes nf4", without("weight.absmax"), "lacks its .*absmax"),
        ("bitsandbytes nf4", without("weight.quant_state.bitsandbytes__nf4"), "no quant_state"),
        ("NVFP4 of modelopt", without("weight_scale_2"), r"lacks its .*weight_scale_2"),
        ("NVFP4 of modelopt", cut("weight_scale"), r"weight_scale has the shape \[127, 4\]; expected"),
        ("bitsandbytes int8", cut("SCB"), r"SCB has the shape \[127\]"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_each_other_are_refused(tmp_path: Path, method: str, edit: Edit, reason: str) -> None:
    path = write(method, tmp_path)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=reason) as caught:
        read_weights(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "hqq"}, r"is quantized \(hqq\); Headway reads compressed-tensors, AWQ"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "version gemv"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "gptq"}, "its description cannot be read"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "marlin-24"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "its description cannot be read"),
    ],
)
def test_quantization_without_support_is_refused_by_name(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ModelLoadError, match=reason):
        check_config(tmp_path)


@pytest.mark.parametrize("name", ["FP8 of modelopt", "NVFP4 of modelopt"])
def test_modelopts_own_file_describes_an_older_checkpoint(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    expected = load(path)
    config = json.loads((path / "config.json").read_text())
    described = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    own, algorithm = path / "hf_quant_config.json", described["quant_algo"]
    own.write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "group_size": 16}})
    )
    loaded = load(path)
    assert loaded.weights == expected.weights
    assert read_config(str(path)).quantization_config["quant_algo"] == algorithm
    found, weights = loaded.model.state_dict(), expected.model.state_dict()
    assert all(torch.equal(found[each], weights[each]) for each in weights)
    own.write_text(json.dumps({"quantization": [algorithm]}))
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json is not a config: it, or its quantization, is no"):
        check_config(path)
    own.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert check_config(path) is None


def test_numbers_without_scales_are_refused(tmp_path: Path) -> None:
    path = write("FP8 per tensor", tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="in F8_E4M3 has no scales"):
        read_weights(path)
