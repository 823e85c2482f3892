"""Weights of a GGUF file in 4 bits keep them, and give the model of their values."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from replicas.model.attention.cpp import CppAttention
from replicas.model.checkpoint.readers import from_gguf
from replicas.model.loading.config import read_config
from replicas.model.loading.gguf import convert
from replicas.model.loading.weights import load_weights
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import build_engine, check_equals_generate, load_compiled, random_prompts
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.model.tiny_gguf import write_gguf

KINDS = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)


def converted(directory: Path, kind: GGMLQuantizationType) -> Path:
    """Return the converted checkpoint of a tiny file; beside it stands `dense`."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
    plain = write_checkpoint(directory / "plain", **sizes)
    (directory / "converted").mkdir()
    convert(write_gguf(directory / "tiny.gguf", plain, kind), directory / "converted")
    return directory / "converted"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_linear_layers_keep_their_bits_and_their_values(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    need_kernels()
    path = converted(tmp_path, kind)
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    found = load_weights(str(path), read_config(str(path)), torch.float32).model.state_dict()
    for name, values in expected.items():
        if name.endswith("_proj.weight"):
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
    save_file(found, tmp_path / "dense" / "model.safetensors", {"format": "pt"})  # with the other weights as converted
    loaded = load_compiled(path)
    assert loaded.weights == "GGUF, 4-bit, kept in 4 bits"
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
