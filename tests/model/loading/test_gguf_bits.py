"""Quantized weights of a GGUF file keep their bits, and give the model of their values."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from replicas.engine.config import EngineLimits
from replicas.model.attention.cpp import CppAttention
from replicas.model.checkpoint.readers import from_gguf
from replicas.model.loading.config import read_config
from replicas.model.loading.gguf import convert
from replicas.model.loading.gguf_blocks import KEPT_TYPES, read_blocks
from replicas.model.loading.memory import replica_memory
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.loading.weights import load_weights
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import build_engine, check_equals_generate, load_compiled, random_prompts
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.model.tiny_gguf import write_gguf

KINDS = {
    "Q4_1": (GGMLQuantizationType.Q4_1, None, "4-bit, kept in 4 bits"),
    "Q8_0": (GGMLQuantizationType.Q8_0, None, "8-bit, kept in 8 bits"),
    "IQ4_NL": (GGMLQuantizationType.IQ4_NL, None, "4-bit, kept in 4 bits"),
    "Q4_K_M": (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, "4-bit and 8-bit, kept in 4 or 8 bits"),
}
"""Types of linear weights, the finer type of some of them, and the words about them."""
FACTORS = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
"""Places of the 16-bit floats in the blocks of a type; the others have one at their beginning."""


@pytest.mark.parametrize("kind", sorted(KEPT_TYPES), ids=lambda kind: kind.name)
def test_blocks_have_the_values_that_the_library_reads(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, 3, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for place in FACTORS.get(kind, (0,)):
        blocks[..., place : place + 2] = rng.normal(size=(6, 3, 1)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(6, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    found = from_gguf(read_blocks(torch.from_numpy(rows), kind)).dense(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def converted(directory: Path, kind: GGMLQuantizationType, finer: GGMLQuantizationType | None) -> Path:
    """Return the converted checkpoint of a tiny file; beside it stands `dense`."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
    plain = write_checkpoint(directory / "plain", **sizes)
    (directory / "converted").mkdir()
    convert(write_gguf(directory / "tiny.gguf", plain, kind, finer), directory / "converted")
    return directory / "converted"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_linear_layers_keep_their_bits_and_their_values(tmp_path: Path, name: str) -> None:
    need_kernels()
    kind, finer, words = KINDS[name]
    path = converted(tmp_path, kind, finer)
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    found = load_weights(str(path), read_config(str(path)), torch.float32).model.state_dict()
    for name, values in expected.items():
        if name.endswith("_proj.weight"):
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
    save_file(found, tmp_path / "dense" / "model.safetensors", {"format": "pt"})  # with the other weights as converted
    loaded = load_compiled(path)
    assert loaded.weights == f"GGUF, {words}"
    taken = sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
    options = ModelOptions(str(path), dtype="float32", device="cpu")
    assert replica_memory(path, options, RunnerOptions(), EngineLimits()).weights == pytest.approx(taken, rel=0.02)
    engine = build_engine(loaded, attention=CppAttention)
    check_equals_generate(engine, tmp_path / "dense", random_prompts((5, 40)), max_tokens=32)


def test_a_dense_conversion_has_plain_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", write_checkpoint(tmp_path / "plain"), GGMLQuantizationType.Q4_0)
    (tmp_path / "converted").mkdir()
    convert(file, tmp_path / "converted", keeps_bits=False)
    stored = load_file(tmp_path / "converted" / "model.safetensors")
    assert {values.dtype for values in stored.values()} == {torch.bfloat16}


def test_a_group_without_a_scale_has_its_minimum() -> None:
    weight = from_gguf({
        ".weight_nibbles": torch.full((1, 32), 0x53, dtype=torch.uint8),
        ".weight_scale": torch.tensor([[0.0, 0.5]]),
        ".weight_minimum": torch.tensor([[-0.25, 1.0]]),
    })  # fmt: skip
    dense = weight.dense(torch.float32)
    assert dense[0, :32].unique().tolist() == [-0.25]
    assert dense[0, 32:34].tolist() == [2.5, 3.5]
