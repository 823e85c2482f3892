"""In float32 a request's output depends on the request alone: not on neighbours, chunks, hits or preemptions.

A sequence whose numbers go wrong harms no other, not even through the blocks it leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend
from replicas.model.loading.loaded_model import LoadedModel
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    load_compiled,
    num_preemptions,
    random_prompts,
    reference_model,
    reference_tokens,
    requests_for,
    run,
    tokens,
)
from testkit.model.tiny_checkpoints import ARCHITECTURES, write_checkpoint

pytestmark = pytest.mark.rotated

NUM_OUTPUT_TOKENS = 16
PROMPTS = random_prompts((5, 33, 60, 90))
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, top_p=0.95, seed=7)
WHOLE = Sizes(max_num_batched_tokens=512)
ONE_OF_EACH_KIND = (
    "llama",
    "gpt2",
    "gemma2-window",
    "qwen3_moe",
    "gpt_oss-window",
    "deepseek_v3",
    "gemma4_text-shared",
)
POISON = 2  # No random prompt has this token.
POISONED_PROMPTS = random_prompts((9, 21, 35, 18, 50, 7), seed=8)
# Of blocks of 4, the prompts take 49 and the finished sequences 65.
TIGHT = Sizes(num_blocks=54, block_size=4)


@dataclass(frozen=True)
class Case:
    loaded: LoadedModel
    expected: list[list[int]]
    """Output of `generate()` for each prompt."""


def reference_of(architecture: str) -> list[list[int]]:
    """Return the output of `generate()` for each prompt. A model that repeats one token would pass every test."""
    expected = cached_reference(architecture, PROMPTS, NUM_OUTPUT_TOKENS)
    assert len({token for output in expected for token in output}) >= 20
    return expected


def case_of(architecture: str) -> Case:
    return Case(load(cached_checkpoint(architecture)), reference_of(architecture))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.fixture(
    scope="module",
    params=[
        architecture if architecture in ONE_OF_EACH_KIND else pytest.param(architecture, marks=pytest.mark.deep)
        for architecture in ARCHITECTURES
    ],
)
def kind(request: pytest.FixtureRequest) -> Case:
    """Case for what the engine does alike for all models: one model of each kind; with `--deep` all models."""
    return case_of(request.param)


@pytest.mark.sampled(14)
def test_alone_and_whole_equals_generate(case: Case) -> None:
    engine = build_engine(case.loaded, WHOLE)
    assert [tokens(engine, [prompt], GREEDY)[0] for prompt in PROMPTS] == case.expected


@pytest.mark.sampled(3)
def test_batched_and_chunked_equals_generate(kind: Case) -> None:
    assert tokens(build_engine(kind.loaded), PROMPTS, GREEDY) == kind.expected


@pytest.mark.sampled(3)
def test_prefix_hit_equals_cold(kind: Case) -> None:
    engine = build_engine(kind.loaded)
    requests = requests_for(PROMPTS, GREEDY)
    cold, warm = run(engine, requests), run(engine, requests)
    assert [output.usage.cached_tokens for output in warm] == [0, 32, 48, 80]
    assert [list(output.token_ids) for output in cold] == kind.expected
    assert [list(output.token_ids) for output in warm] == kind.expected


@pytest.mark.sampled(3)
def test_preempted_equals_uninterrupted(kind: Case) -> None:
    engine = build_engine(kind.loaded, TIGHT)
    assert tokens(engine, PROMPTS, GREEDY) == kind.expected
    assert num_preemptions(engine) > 0


@pytest.mark.sampled(3)
def test_seeded_sampling_is_the_same_alone_batched_and_preempted(kind: Case) -> None:
    alone = [tokens(build_engine(kind.loaded, WHOLE), [prompt], SEEDED)[0] for prompt in PROMPTS]
    assert alone != kind.expected
    preempting = build_engine(kind.loaded, TIGHT)
    assert tokens(preempting, PROMPTS, SEEDED) == alone
    assert num_preemptions(preempting) > 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_compiled_kernels_output_equals_generate(architecture: str) -> None:
    loaded = load_compiled(cached_checkpoint(architecture))
    expected = reference_of(architecture)
    # The tightest run has batches, chunks and preemptions; the others differ by kind of model alone.
    for sizes in (WHOLE, Sizes(), TIGHT) if architecture in ONE_OF_EACH_KIND else (TIGHT,):
        engine = build_engine(loaded, sizes, CppAttention)
        assert tokens(engine, PROMPTS, GREEDY) == expected
    assert num_preemptions(engine) > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, prompt_logprobs=1)], ids=["generated", "scored"])
@pytest.mark.parametrize(
    ("load_poisoned", "attention"), [(load, GatherAttention), (load_compiled, CppAttention)], ids=["plain", "compiled"]
)
def test_sequence_with_nan_fails_alone_and_its_blocks_are_reused(
    tmp_path: Path, load_poisoned: Callable[[Path], LoadedModel], attention: AttentionBackend, params: SamplingParams
) -> None:
    if attention is CppAttention:
        need_kernels()
    path = write_checkpoint(tmp_path, with_tokenizer=False)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    engine = build_engine(load_poisoned(path), Sizes(num_blocks=12, max_num_seqs=4), attention)
    expected = reference_tokens(reference_model(path), POISONED_PROMPTS, params.max_tokens)
    for round_number in range(3):
        requests = [GenerateRequest(f"{round_number}-{i}", prompt, params) for i, prompt in enumerate(POISONED_PROMPTS)]
        poisoned = GenerateRequest(
            f"{round_number}-bad", (*POISONED_PROMPTS[2][:20], POISON, *POISONED_PROMPTS[2][:20]), params
        )
        bad, *outputs = run(engine, [poisoned, *requests])
        assert bad.error is not None and "not finite" in bad.error.message
        assert [list(output.token_ids) for output in outputs] == expected
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
