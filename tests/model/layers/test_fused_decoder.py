"""The fused decoder computes what transformers' own decoder computes."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.model.attention.interface import ATTENTION_NAME, AttentionPort, register_attention
from replicas.model.attention.probe import probe_attention
from replicas.model.layers.fused_decoder import FusedDecoder, can_fuse
from replicas.model.layers.optimize import cpu_modules, optimize_model
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import build_engine, load, random_prompts, reference_model, run
from testkit.model.tiny_checkpoints import ARCHITECTURES, tiny_config, write_checkpoint

FAMILY = ["llama", "mistral-window", "qwen2", "qwen2-window", "qwen3"]
# Of the family's configs, what changes the layers' parts.
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    ("llama", {"head_dim": 24}),
    ("qwen3", {"attention_bias": True}),
    *((architecture, {}) for architecture in FAMILY),
]


def random_model(architecture: str) -> PreTrainedModel:
    register_attention()
    return AutoModelForCausalLM.from_config(tiny_config(architecture), attn_implementation=ATTENTION_NAME).eval()


def with_random_biases(path: Path) -> Path:
    """The checkpoint with biases that matter; transformers begins with zeros."""
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    biases = {name: torch.randn(bias.shape, generator=generator) for name, bias in weights.items() if "bias" in name}
    save_file({**weights, **biases}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_exactly_the_family_is_fused() -> None:
    assert [architecture for architecture in ARCHITECTURES if can_fuse(random_model(architecture))] == FAMILY


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_log_probabilities_are_those_of_transformers(
    tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    path = with_random_biases(write_checkpoint(tmp_path, architecture, with_tokenizer=False, **changes))
    loaded = load(path)
    assert isinstance(loaded.model.model, FusedDecoder)
    (prompt,) = random_prompts((100,))
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    (output,) = run(build_engine(loaded), [GenerateRequest("request", prompt, params)])
    with torch.inference_mode():
        expected = reference_model(path)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = torch.empty(512)
    for entry in output.logprobs[0].top:
        found[entry.token_id] = entry.logprob
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2-window"])
def test_no_replaced_weight_is_kept(architecture: str) -> None:
    model = random_model(architecture)
    port = AttentionPort(model)
    layers = probe_attention(model, port)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    optimize_model(model, port, layers, cpu_modules(torch.float32, has_kernels=False, quantization="none"))
    assert len(weights) == 3 * 7 + 1
    assert [weight() for weight in weights] == [None] * len(weights)
