"""In bfloat16 rounding depends on batch and chunks, so output may differ from `generate()`; only at near-ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replicas.protocol import GenerateRequest, SamplingParams
from tests.model.serving import (
    Prompt,
    build_engine,
    load,
    random_prompts,
    reference_model,
    reference_tokens,
    run,
    tokens,
)
from tests.model.tiny import ARCHITECTURES, write_checkpoint

PROMPTS = random_prompts((5, 33, 60, 90, 20, 100, 7, 50), seed=3)
NUM_OUTPUT_TOKENS = 24


def next_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    """Logits [vocab_size] float32 after `token_ids`."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].float()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2-window", "phi3-window", "gpt2", "cohere2-window"])
def test_first_differences_are_near_ties(
    tmp_path: Path, architecture: str, record_property: Callable[[str, object], None]
) -> None:
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
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
def test_rounding_error_is_that_of_the_models_own_code(tmp_path: Path, architecture: str) -> None:
    """Against float32, log probabilities from the cache err as much as those of transformers' own forward pass."""
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    prompts = random_prompts((60, 90, 100, 7), seed=3)
    requests = [GenerateRequest(f"request-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    outputs = run(build_engine(load(path, "bfloat16")), requests)
    reference, exact = reference_model(path, torch.bfloat16), reference_model(path)
    ours, theirs = [], []
    for output, prompt in zip(outputs, prompts, strict=True):
        true = log_probabilities(exact, prompt)
        found = torch.empty(512)
        for entry in output.logprobs[0].top:
            found[entry.token_id] = entry.logprob
        ours.append(float((found - true).abs().mean()))
        theirs.append(float((log_probabilities(reference, prompt) - true).abs().mean()))
    assert sum(ours) <= 2 * sum(theirs)


def log_probabilities(model: torch.nn.Module, prompt: Prompt) -> Tensor:
    """Of the token after `prompt`, [vocab_size] float32."""
    return next_logits(model, list(prompt)).log_softmax(-1)
