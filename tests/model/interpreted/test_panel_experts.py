"""Experts whose weights stay in panels: products by definition, and the tokens of the dequantized model."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from replicas.model.checkpoint.quantized_linear import concatenate
from replicas.model.layers.experts import ExpertLayer, FusedExperts, PanelExpertLinear, Routing
from replicas.model.layers.linear import kept_panels
from replicas.model.layers.panels import PanelLinear, Panels, pack_panels
from replicas.model.layers.triton_panels import TritonPanels
from replicas.model.loading.config import read_config
from replicas.model.loading.memory import weights_on_gpu
from replicas.model.loading.weights import load_weights
from replicas.model.parallel.shares import ModelCuts, Share
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import build_engine, check_equals_generate, random_prompts
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.tiny_checkpoints import write_checkpoint
from tests.model.interpreted.test_experts import by_definition, random_index
from tests.model.interpreted.test_panels import CPU, KINDS, TOLERANCES, drawn, load_in_panels, taken_bytes, weight_of

pytestmark = [pytest.mark.usefixtures("bfloat16"), pytest.mark.rotated]
NUM_EXPERTS = 5


@pytest.mark.parametrize(
    ("kind", "num_tokens", "is_batch_invariant"),
    [
        ("fp4", 3, False),
        ("fp8", 60, True),
        ("int4", 140, False),
        *(pytest.param(kind, number, False, marks=pytest.mark.deep) for kind in KINDS for number in (1, 40, 300)),
    ],
)
def test_products_are_those_of_the_definition(kind: str, num_tokens: int, is_batch_invariant: bool) -> None:
    dtype = torch.bfloat16
    weights = [weight_of(kind, (70, 96), 32) for _ in range(NUM_EXPERTS)]
    weights = [replace(weight, scales=weight.scales * (number + 1)) for number, weight in enumerate(weights)]
    biases, inputs = drawn(NUM_EXPERTS, 70, dtype=dtype), drawn(num_tokens, 96, dtype=dtype)
    index = random_index(torch.Generator().manual_seed(1), num_tokens, NUM_EXPERTS, 2)
    routing = Routing.of(index, NUM_EXPERTS)
    dense = torch.stack([weight.dense(torch.float32) for weight in weights])
    layer = ExpertLayer(Panels.stack([pack_panels(weight) for weight in weights]), biases, is_transposed=True)
    linear = PanelExpertLinear(TritonPanels(CPU, is_batch_invariant=is_batch_invariant))
    expected = by_definition(inputs, ExpertLayer(dense, biases, is_transposed=False), index).flatten(0, 1)
    first = linear(inputs, layer, routing, is_first=True)
    second = linear(inputs.repeat_interleave(2, dim=0)[routing.order], layer, routing, is_first=False)
    for output, wanted in ((first, expected[routing.order]), (second, expected)):
        error = (output.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert output.dtype == dtype and float(error.max()) < TOLERANCES[dtype]


FP8 = "kept in 8 bits; activations stay in float32, not 8-bit float"
LINEARS = ("_proj.weight", *(f".experts.{number}.w{part}.weight" for number in range(4) for part in (1, 2, 3)))
CHECKPOINTS = [
    ("gpt_oss-window", "MXFP4", "MXFP4, 4-bit, kept in 4 bits"),
    ("qwen3_moe", "compressed-tensors FP8 blocks", FP8),
    ("mixtral", "GPTQ", "GPTQ, 4-bit, kept in 4 bits"),
    ("nemotron_h", "compressed-tensors FP8 blocks", FP8),
    pytest.param("lfm2_moe", "compressed-tensors W4A16", "4-bit, kept in 4 bits", marks=pytest.mark.deep),
    pytest.param(
        "minimax_m2", "FP8 per tensor", "kept in 8 bits; activations stay in float32, not FP8", marks=pytest.mark.deep
    ),
    pytest.param(
        "nemotron_h",
        "NVFP4 of modelopt",
        "4-bit, kept in 4 bits; activations stay in float32, not FP4",
        marks=pytest.mark.deep,
    ),
    pytest.param("qwen3_moe", "AWQ", "AWQ, 4-bit, kept in 4 bits", marks=pytest.mark.deep),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("architecture", "name", "description"), CHECKPOINTS)
def test_kept_experts_give_the_tokens_of_the_dequantized_model(
    tmp_path: Path, architecture: str, name: str, description: str
) -> None:
    """Some checkpoints have names of their own, which transformers changes, and some experts have no gate."""
    method = METHODS[name]
    if name != "MXFP4":
        method = replace(method, is_quantized=lambda weight: weight.endswith(LINEARS))
    path = quantize_checkpoint(cached_checkpoint(architecture), tmp_path, method)
    loaded = load_in_panels(path, TritonPanels(CPU))
    assert loaded.weights.endswith(description)
    experts = [module for module in loaded.model.modules() if isinstance(module, FusedExperts)]
    first = "up_proj" if architecture == "nemotron_h" else "gate_up_proj"
    assert experts and all(module.kept.keys() == {first, "down_proj"} for module in experts)
    found = weights_on_gpu(path, "float32", 4, keeps_bits=True)
    assert found.description == loaded.weights
    linears = [module.panels for module in loaded.model.modules() if isinstance(module, PanelLinear)]
    in_panels = [*linears, *(panels for module in experts for panels in module.kept.values())]
    padding = sum(map(_padding_bytes, in_panels))
    assert found.num_bytes == pytest.approx(taken_bytes(loaded.model) - padding, rel=0.03)
    check_equals_generate(build_engine(loaded), path.parent / "dense", random_prompts((5, 9)), max_tokens=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("architecture", "name", "changes"),
    [
        ("gpt_oss-window", "MXFP4", {}),
        ("qwen3_moe", "AWQ", {"moe_intermediate_size": 64}),  # Panels of 4 bits need 32 inputs on each rank.
        ("mixtral", "FP8 per tensor", {}),
    ],
)
def test_results_of_the_ranks_experts_add_up(
    tmp_path: Path, architecture: str, name: str, changes: dict[str, int]
) -> None:
    method = METHODS[name]
    if name != "MXFP4":
        method = replace(method, is_quantized=lambda weight: weight.endswith(LINEARS))
    dense = tmp_path / "whole"
    dense.mkdir()
    path = quantize_checkpoint(write_checkpoint(dense, architecture, False, **changes), tmp_path, method)
    config, kept = read_config(str(path)), kept_panels(TritonPanels(CPU))
    hidden, weights = torch.randn(3, config.hidden_size), torch.rand(3, 2)
    index = torch.tensor([[0, 1], [3, 2], [1, 3]])

    def results(cuts: ModelCuts | None) -> torch.Tensor:
        model = load_weights(str(path), config, torch.float32, kept=kept, cuts=cuts).model
        experts = next(module for module in model.modules() if isinstance(module, FusedExperts))
        output = experts(hidden, index, weights)
        assert isinstance(output, torch.Tensor)
        return output

    parts = [results(ModelCuts(config, Share(rank, 2))) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], results(None), rtol=1e-4, atol=1e-5)


def test_experts_in_an_order_of_activations_become_dense(tmp_path: Path) -> None:
    """A product with experts would need the inputs of each expert in another order."""
    method = replace(METHODS["GPTQ desc_act"], is_quantized=lambda weight: weight.endswith(LINEARS))
    path = quantize_checkpoint(cached_checkpoint("mixtral"), tmp_path, method)
    found = weights_on_gpu(path, "float32", 4, keeps_bits=True)
    assert found.description == "GPTQ, 4-bit, kept in 4 bits, 36 of 48 dequantized to float32"
    loaded = load_in_panels(path, TritonPanels(CPU))
    assert loaded.weights == found.description
    assert not any(isinstance(module, FusedExperts) for module in loaded.model.modules())


def _padding_bytes(panels: Panels) -> int:
    """Return the bytes that fill the last panels and units."""
    numbers = math.prod(panels.scales.shape[:-2]) * panels.num_outputs * panels.num_inputs
    return panels.numbers.nbytes - numbers * panels.format.bits // 8


def test_weights_of_gpt_oss_20b_take_less_than_16_gb(tmp_path: Path) -> None:
    """A file with the tensors that the model's config implies, and holes in place of their numbers."""
    hidden, inner, num_experts, num_layers, vocab_size, num_heads, num_kv_heads = 2880, 2880, 32, 24, 201_088, 64, 8
    layer = {
        "mlp.experts.gate_up_proj_blocks": ("U8", (num_experts, 2 * inner, hidden // 32, 16)),
        "mlp.experts.gate_up_proj_scales": ("U8", (num_experts, 2 * inner, hidden // 32)),
        "mlp.experts.gate_up_proj_bias": ("BF16", (num_experts, 2 * inner)),
        "mlp.experts.down_proj_blocks": ("U8", (num_experts, hidden, inner // 32, 16)),
        "mlp.experts.down_proj_scales": ("U8", (num_experts, hidden, inner // 32)),
        "mlp.experts.down_proj_bias": ("BF16", (num_experts, hidden)),
        "self_attn.q_proj.weight": ("BF16", (64 * num_heads, hidden)),
        "self_attn.k_proj.weight": ("BF16", (64 * num_kv_heads, hidden)),
        "self_attn.v_proj.weight": ("BF16", (64 * num_kv_heads, hidden)),
        "self_attn.o_proj.weight": ("BF16", (hidden, 64 * num_heads)),
    }
    tensors = {f"model.layers.{number}.{name}": part for number in range(num_layers) for name, part in layer.items()}
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (vocab_size, hidden)))
    write_holes(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    kept, dense = (weights_on_gpu(tmp_path, "bfloat16", 2, keeps_bits=keeps_bits) for keeps_bits in (True, False))
    assert kept.num_bytes < 16e9 < 40e9 < dense.num_bytes


def write_holes(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a checkpoint of zeros, which takes no room on the disk."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_joined_weights_keep_the_values_of_their_blocks() -> None:
    shape = (80, 96)
    blocks = [replace(weight_of("fp8", (2, 96), 32), numbers=weight_of("fp8", shape, 32).numbers, outputs_per_scale=48)]
    other = weight_of("fp8", (33, 96), 32)
    joined = concatenate([*blocks, other])
    assert torch.equal(joined.dense(torch.float32), torch.cat([part.dense(torch.float32) for part in (*blocks, other)]))
