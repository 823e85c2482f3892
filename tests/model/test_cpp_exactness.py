"""With compiled kernels, too, greedy output is `generate()`'s, and a sequence whose numbers go wrong fails alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replicas.model.attention_choice import choose_attention
from replicas.model.cpp_attention import CppAttention
from replicas.model.loader import LoadedModel, load_model
from replicas.model.options import ModelOptions
from replicas.protocol import GenerateRequest, SamplingParams
from tests.model.compiled import need_kernels
from tests.model.serving import (
    MAX_MODEL_LEN,
    Sizes,
    build_engine,
    num_preemptions,
    random_prompts,
    reference_model,
    reference_tokens,
    run,
    tokens,
)
from tests.model.test_bfloat16 import log_probabilities
from tests.model.test_exactness import TIGHT, WHOLE
from tests.model.test_poison import POISON, write_poisoned
from tests.model.tiny import ARCHITECTURES, write_checkpoint

pytestmark = pytest.mark.usefixtures("_kernels")
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def _kernels() -> None:
    need_kernels()


def load_compiled(
    path: Path, dtype: str = "float32", quantization: str = "none", max_model_len: int = MAX_MODEL_LEN
) -> LoadedModel:
    options = ModelOptions(str(path), dtype=dtype, device="cpu", max_model_len=max_model_len, quantization=quantization)
    loaded = load_model(options)
    assert choose_attention(loaded.attention_spec(16), "auto") is CppAttention
    return loaded


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_that_of_generate(tmp_path: Path, architecture: str) -> None:
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    prompts = random_prompts((5, 33, 60, 90))
    expected = reference_tokens(reference_model(path), prompts, GREEDY.max_tokens)
    loaded = load_compiled(path)
    for sizes in (WHOLE, Sizes(), TIGHT):
        engine = build_engine(loaded, sizes, choose_attention(loaded.attention_spec(16), "auto"))
        assert tokens(engine, prompts, GREEDY) == expected
    assert num_preemptions(engine) > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounding_error_in_bfloat16_is_that_of_the_models_own_code(tmp_path: Path, architecture: str) -> None:
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    prompts = random_prompts((60, 90, 100, 7), seed=3)
    requests = [GenerateRequest(f"request-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    loaded = load_compiled(path, "bfloat16")
    outputs = run(build_engine(loaded, attention=choose_attention(loaded.attention_spec(16), "auto")), requests)
    reference, exact = reference_model(path, torch.bfloat16), reference_model(path)
    ours, theirs = 0.0, 0.0
    for output, prompt in zip(outputs, prompts, strict=True):
        true = log_probabilities(exact, prompt)
        found = torch.empty(512)
        for entry in output.logprobs[0].top:
            found[entry.token_id] = entry.logprob
        ours += float((found - true).abs().mean())
        theirs += float((log_probabilities(reference, prompt) - true).abs().mean())
    assert ours <= 2 * theirs


def test_sequence_with_nan_fails_alone(tmp_path: Path) -> None:
    path = write_poisoned(tmp_path)
    loaded = load_compiled(path)
    engine = build_engine(
        loaded, Sizes(num_blocks=12, max_num_seqs=4), choose_attention(loaded.attention_spec(16), "auto")
    )
    prompts = random_prompts((9, 21, 35, 18, 50, 7), seed=8)
    expected = reference_tokens(reference_model(path), prompts, GREEDY.max_tokens)
    for round_number in range(3):
        requests = [GenerateRequest(f"{round_number}-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
        poisoned = GenerateRequest(f"{round_number}-bad", (*prompts[2][:20], POISON, *prompts[2][:20]), GREEDY)
        outputs = run(engine, [poisoned, *requests])
        assert outputs[0].error is not None and "not finite" in str(outputs[0].error)
        assert [list(output.token_ids) for output in outputs[1:]] == expected
