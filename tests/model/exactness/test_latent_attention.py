"""Layers with latent attention store one latent key, and compute the tokens of the keys and values of all heads."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import bytes_per_block
from replicas.model.attention.probe import probe_attention
from replicas.model.attention.select import choose_attention
from replicas.model.diagnosis import memory_of
from replicas.model.layers import latent_attention
from replicas.model.loading.config import read_config
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    load_compiled,
    log_probabilities,
    num_preemptions,
    random_model,
    random_prompts,
    requests_for,
    run,
    tokens,
)
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.tiny_checkpoints import LATENT_ARCHITECTURES

pytestmark = pytest.mark.rotated

TYPES = ("deepseek_v2", "deepseek_v3", *LATENT_ARCHITECTURES)
NUM_OUTPUT_TOKENS = 64
PROMPTS = random_prompts((5, 40, 60), seed=2)
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, seed=7)
# Of blocks of 4, the prompts take 27 and the finished sequences 75.
TIGHT = Sizes(num_blocks=60, block_size=4)
EXPANDED_BYTES, LATENT_BYTES = 4 * (48 + 32) * 4, (32 + 16) * 4
"""Bytes of one token in a layer of the tiny models, in float32: of four heads, and of a latent and its rotary part."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", TYPES)
def test_every_type_equals_generate(architecture: str) -> None:
    """In chunks, after prefix hits, and preempted in the compiled kernels."""
    need_kernels()
    path = cached_checkpoint(architecture)
    expected = cached_reference(architecture, PROMPTS, NUM_OUTPUT_TOKENS)
    assert len({token for output in expected for token in output}) >= 20
    plain = load(path)
    assert bytes_per_block(plain.layers, 1, torch.float32) == len(plain.layers) * LATENT_BYTES
    engine = build_engine(plain)
    for cached_tokens in ([0, 0, 0], [0, 32, 48]):
        outputs = run(engine, requests_for(PROMPTS, GREEDY))
        assert [list(output.token_ids) for output in outputs] == expected
        assert [output.usage.cached_tokens for output in outputs] == cached_tokens
    tight = build_engine(load_compiled(path), TIGHT, CppAttention)
    assert tokens(tight, PROMPTS, GREEDY) == expected
    assert num_preemptions(tight) > 0


def test_seeded_tokens_are_those_of_the_sequence_alone() -> None:
    need_kernels()
    loaded = load_compiled(cached_checkpoint("deepseek_v3"))
    alone = build_engine(loaded, Sizes(max_num_batched_tokens=512), CppAttention)
    expected = [tokens(alone, [prompt], SEEDED)[0] for prompt in PROMPTS]
    assert tokens(build_engine(loaded, Sizes(num_blocks=36, block_size=4), CppAttention), PROMPTS, SEEDED) == expected


@pytest.mark.parametrize("architecture", ["deepseek_v3", "minicpm3"])
def test_the_doctor_predicts_the_cache(architecture: str) -> None:
    path = cached_checkpoint(architecture)
    assert memory_of(read_config(str(path)), torch.float32).kv_bytes_per_token == 3 * LATENT_BYTES


def test_a_layer_that_would_compute_something_else_keeps_all_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, num_calls = latent_attention.latent_key, 0

    def wrong_in_the_second_layer(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        num_calls += 1
        return right(latent + (num_calls == 2), rotary)

    monkeypatch.setattr(latent_attention, "latent_key", wrong_in_the_second_layer)
    with caplog.at_level(logging.WARNING):
        loaded = load(cached_checkpoint("deepseek_v3"))
    assert "1 of 3 layers store keys and values of all heads" in caplog.text and "layer 1" in caplog.text
    assert [layer.has_values_in_keys for layer in loaded.layers] == [True, False, True]
    assert bytes_per_block(loaded.layers, 1, torch.float32) == 2 * LATENT_BYTES + EXPANDED_BYTES
    expected = cached_reference("deepseek_v3", PROMPTS, NUM_OUTPUT_TOKENS)
    assert tokens(build_engine(loaded), PROMPTS, GREEDY) == expected


def test_flash_attention_is_refused() -> None:
    spec = load(cached_checkpoint("deepseek_v3")).attention_spec(16)
    with pytest.raises(ModelLoadError, match="'flash', which does not work here: it does not read latent keys"):
        choose_attention(spec, "flash")


def test_the_form_of_other_models_stays() -> None:
    model = random_model("llama")
    port = AttentionPort(model)
    assert not latent_attention.store_checked_latents(model, port)
    assert not any(layer.has_values_in_keys for layer in probe_attention(model, port))


def test_weights_in_4_bits_become_dense_for_the_products_of_heads(tmp_path: Path) -> None:
    need_kernels()
    path = quantize_checkpoint(cached_checkpoint("minicpm3"), tmp_path, METHODS["AWQ"])
    loaded, dense = load_compiled(path), load(path)
    assert loaded.weights == "AWQ, 4-bit, kept in 4 bits"
    assert all(layer.has_values_in_keys for layer in loaded.layers)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    found, expected = (
        torch.stack([log_probabilities(output) for output in run(build_engine(model), requests_for(PROMPTS, params))])
        for model in (loaded, dense)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
