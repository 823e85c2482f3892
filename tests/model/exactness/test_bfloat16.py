"""In bfloat16 rounding depends on batch and chunks, so output may differ from `generate()`; only at near-ties."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replicas.model.attention.cpp import CppAttention
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_log_probabilities
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    build_engine,
    load,
    load_compiled,
    log_probabilities,
    random_prompts,
    reference_model,
    reference_tokens,
    requests_for,
    run,
    tokens,
)
from testkit.model.tiny_checkpoints import ARCHITECTURES

pytestmark = pytest.mark.rotated

PROMPTS = random_prompts((5, 33, 60, 90, 20, 100, 7, 50), seed=3)
ROUNDED_PROMPTS = random_prompts((60, 90, 100, 7), seed=3)
NUM_OUTPUT_TOKENS = 24


def next_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    """Logits [vocab_size] float32 after `token_ids`."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].float()


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(16)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounding_error_is_that_of_the_models_own_code(architecture: str, is_compiled: bool) -> None:
    """Against float32, log probabilities from the cache err as much as those of transformers' own forward pass."""
    path = cached_checkpoint(architecture)
    if is_compiled:
        need_kernels()
        engine = build_engine(load_compiled(path, "bfloat16"), attention=CppAttention)
    else:
        engine = build_engine(load(path, "bfloat16"))
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    outputs = run(engine, requests_for(ROUNDED_PROMPTS, params))
    found = torch.stack([log_probabilities(output) for output in outputs])
    exact, own = (
        cached_log_probabilities(architecture, ROUNDED_PROMPTS, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert (found - exact).abs().mean() <= 2 * (own - exact).abs().mean()
