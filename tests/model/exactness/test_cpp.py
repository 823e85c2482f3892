"""With compiled kernels, too, greedy output is `generate()`'s, and a sequence whose numbers go wrong fails alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.select import choose_attention
from replicas.model.loading.loader import LoadedModel, load_model
from replicas.model.loading.options import ModelOptions
from replicas.protocol import GenerateRequest
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
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
from testkit.model.tiny_checkpoints import ARCHITECTURES
from tests.model.exactness.test_bfloat16 import rounding_error, rounding_error_of_own_code
from tests.model.exactness.test_plain import GREEDY, NUM_OUTPUT_TOKENS, PROMPTS, TIGHT, WHOLE
from tests.model.exactness.test_poison import POISON, write_poisoned

pytestmark = pytest.mark.usefixtures("_kernels")


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
def test_output_is_that_of_generate(architecture: str) -> None:
    loaded = load_compiled(cached_checkpoint(architecture))
    expected = cached_reference(architecture, PROMPTS, NUM_OUTPUT_TOKENS)
    for sizes in (WHOLE, Sizes(), TIGHT):
        engine = build_engine(loaded, sizes, choose_attention(loaded.attention_spec(16), "auto"))
        assert tokens(engine, PROMPTS, GREEDY) == expected
    assert num_preemptions(engine) > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounding_error_in_bfloat16_is_that_of_the_models_own_code(architecture: str) -> None:
    loaded = load_compiled(cached_checkpoint(architecture), "bfloat16")
    engine = build_engine(loaded, attention=choose_attention(loaded.attention_spec(16), "auto"))
    assert rounding_error(engine, architecture) <= 2 * rounding_error_of_own_code(architecture)


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
