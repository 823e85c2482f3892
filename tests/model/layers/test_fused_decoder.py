"""The fused decoder computes what transformers' own computes; in one call of the kernels the same as layer by layer."""

import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.probe import probe_attention
from replicas.model.layers.cpp_decoder import CppDecoder
from replicas.model.layers.fused_decoder import FusedDecoder, can_fuse
from replicas.model.layers.optimize import cpu_modules, optimize_model
from replicas.model.loading.loaded_model import LoadedModel
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    load_compiled,
    log_probabilities,
    random_model,
    random_prompts,
    reference_model,
    requests_for,
    run,
)
from testkit.model.tiny_checkpoints import ARCHITECTURES, write_checkpoint

pytestmark = pytest.mark.rotated

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
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5)
# Longer than what the kernels' own linear layers multiply at once, and shorter.
LENGTHS = (150, 3, 40, 17)
SIZES = Sizes(num_blocks=64, max_num_batched_tokens=200)
at_once = pytest.mark.usefixtures("kernels_in_threads")


def with_random_biases(path: Path) -> Path:
    """Give the checkpoint biases that matter, and return it; transformers begins with zeros."""
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    biases = {name: torch.randn(bias.shape, generator=generator) for name, bias in weights.items() if "bias" in name}
    save_file({**weights, **biases}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_only_the_supported_family_is_fused() -> None:
    assert [architecture for architecture in ARCHITECTURES if can_fuse(random_model(architecture))] == FAMILY


@pytest.mark.sampled(5)
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
    torch.testing.assert_close(log_probabilities(output), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2-window"])
def test_no_replaced_weight_is_kept(architecture: str) -> None:
    model = random_model(architecture)
    port = AttentionPort(model)
    layers = probe_attention(model, port)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    optimize_model(model, port, layers, cpu_modules(torch.float32, has_kernels=False, quantization="none"))
    assert len(weights) == 3 * 7 + 1
    assert [weight() for weight in weights] == [None] * len(weights)


def outputs(loaded: LoadedModel, lengths: Iterable[int] = LENGTHS) -> list[tuple[list[int], object]]:
    """Tokens and log probabilities, to the last bit."""
    engine = build_engine(loaded, SIZES, CppAttention)
    return [
        (output.token_ids, output.logprobs) for output in run(engine, requests_for(random_prompts(lengths), PARAMS))
    ]


def check_bits(loaded: LoadedModel, lengths: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one call runs all layers, with the same results as one call for each layer."""
    assert isinstance(loaded.model.model, CppDecoder)
    found = outputs(loaded, lengths)

    def refuse(*_: object) -> None:
        raise AssertionError("layers ran one by one")

    with monkeypatch.context() as patched:
        patched.setattr(FusedDecoder, "_run_layers", refuse)
        assert outputs(loaded, lengths) == found
    monkeypatch.setattr(CppDecoder, "_run_layers", FusedDecoder._run_layers)
    assert outputs(loaded, lengths) == found


@pytest.mark.sampled(8)
@at_once
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("bfloat16", "none"),
        ("float32", "int8"),
        pytest.param("float32", "none", marks=pytest.mark.deep),
        pytest.param("bfloat16", "int8", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_all_layers_at_once_give_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    changes: dict[str, object],
    dtype: str,
    quantization: str,
) -> None:
    if "head_dim" in changes:
        changes = {"head_dim": 32}  # 24 is no size of the kernels'.
    loaded = load_compiled(
        with_random_biases(write_checkpoint(tmp_path, architecture, with_tokenizer=False, **changes)),
        dtype,
        quantization,
    )
    check_bits(loaded, LENGTHS, monkeypatch)


@pytest.mark.sampled(1)
@at_once
def test_a_long_context_that_threads_divide_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, "llama", with_tokenizer=False, max_position_embeddings=1024)
    check_bits(load_compiled(path, max_model_len=1000), (900,), monkeypatch)


@pytest.mark.sampled(1)
@at_once
def test_layers_without_kernels_run_in_the_fused_decoder(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", with_tokenizer=False, intermediate_size=50)
    loaded = load_compiled(path)
    assert isinstance(loaded.model.model, CppDecoder)
    expected = run(build_engine(load(path), SIZES), requests_for(random_prompts(LENGTHS), PARAMS))
    assert [tokens for tokens, _ in outputs(loaded)] == [output.token_ids for output in expected]
