"""In bfloat16 rounding depends on batch and chunks, so output may differ from `generate()`; only at near-ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replicas.engine.engine import Engine
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_log_probabilities
from testkit.model.engine_runs import build_engine, load, random_prompts, reference_model, reference_tokens, run, tokens
from testkit.model.tiny_checkpoints import ARCHITECTURES

PROMPTS = random_prompts((5, 33, 60, 90, 20, 100, 7, 50), seed=3)
NUM_OUTPUT_TOKENS = 24


def next_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    """Logits [vocab_size] float32 after `token_ids`."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].float()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2-window", "phi3-window", "gpt2", "cohere2-window"])
def test_first_differences_are_near_ties(architecture: str, record_property: Callable[[str, object], None]) -> None:
    path = cached_checkpoint(architecture)
    reference, exact = reference_model(path, torch.bfloat16), reference_model(path)
    expected = reference_tokens(reference, PROMPTS, NUM_OUTPUT_TOKENS)
    params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
    outputs = tokens(build_engine(load(path, "bfloat16")), PROMPTS, params)
    differing = [case for case in zip(PROMPTS, outputs, expected, strict=True) if case[1] != case[2]]
    record_property("num_first_differences", len(differing))
    for prompt, output, other in differing:
        index = next(i for i, pair in enumerate(zip(output, other, strict=True)) if pair[0] != pair[1])
        known = [*prompt, *other[:index]]
        logits = next_logits(reference, known)
        noise = float((logits - next_logits(exact, known)).abs().max())
        assert abs(float(logits[output[index]] - logits[other[index]])) <= 2 * noise


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounding_error_is_that_of_the_models_own_code(architecture: str) -> None:
    """Against float32, log probabilities from the cache err as much as those of transformers' own forward pass."""
    engine = build_engine(load(cached_checkpoint(architecture), "bfloat16"))
    assert rounding_error(engine, architecture) <= 2 * rounding_error_of_own_code(architecture)


ROUNDED_PROMPTS = random_prompts((60, 90, 100, 7), seed=3)


def rounding_error(engine: Engine, architecture: str) -> float:
    """Mean error of an engine's log probabilities against float32."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    requests = [GenerateRequest(f"request-{i}", prompt, params) for i, prompt in enumerate(ROUNDED_PROMPTS)]
    found = torch.full((len(requests), 512), torch.nan)
    for row, output in zip(found, run(engine, requests), strict=True):
        for entry in output.logprobs[0].top:
            row[entry.token_id] = entry.logprob
    return _mean_error(found, architecture)


def rounding_error_of_own_code(architecture: str) -> float:
    """Mean error of transformers' own forward pass in bfloat16 against float32."""
    return _mean_error(cached_log_probabilities(architecture, ROUNDED_PROMPTS, torch.bfloat16), architecture)


def _mean_error(found: Tensor, architecture: str) -> float:
    return float((found - cached_log_probabilities(architecture, ROUNDED_PROMPTS, torch.float32)).abs().mean())
