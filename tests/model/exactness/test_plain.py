"""In float32 a request's output depends on the request alone: not on neighbours, chunks, hits or preemptions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from replicas.model.loading.loader import LoadedModel
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.engine_runs import Prompt, Sizes, build_engine, load, num_preemptions, random_prompts, run, tokens
from testkit.model.tiny_checkpoints import ARCHITECTURES

NUM_OUTPUT_TOKENS = 16
PROMPTS = random_prompts((5, 33, 60, 90))
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, top_p=0.95, seed=7)
WHOLE = Sizes(max_num_batched_tokens=512)
# Of blocks of 4, the prompts take 49 and the finished sequences 65.
TIGHT = Sizes(num_blocks=54, block_size=4)


@dataclass(frozen=True)
class Case:
    loaded: LoadedModel
    prompts: list[Prompt]
    expected: list[list[int]]
    """What `generate()` gives for each prompt."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest) -> Case:
    expected = cached_reference(request.param, PROMPTS, NUM_OUTPUT_TOKENS)
    return Case(load(cached_checkpoint(request.param)), PROMPTS, expected)


def test_reference_output_is_diverse(case: Case) -> None:
    # A model that repeats one token would make every other test here pass.
    assert len({token for output in case.expected for token in output}) >= 20


def test_alone_and_whole_equals_generate(case: Case) -> None:
    engine = build_engine(case.loaded, WHOLE)
    assert [tokens(engine, [prompt], GREEDY)[0] for prompt in case.prompts] == case.expected


def test_batched_and_chunked_equals_generate(case: Case) -> None:
    assert tokens(build_engine(case.loaded), case.prompts, GREEDY) == case.expected


def test_prefix_hit_equals_cold(case: Case) -> None:
    engine = build_engine(case.loaded)
    requests = [GenerateRequest(f"request-{i}", prompt, GREEDY) for i, prompt in enumerate(case.prompts)]
    cold, warm = run(engine, requests), run(engine, requests)
    assert [output.usage.cached_tokens for output in warm] == [0, 32, 48, 80]
    assert [list(output.token_ids) for output in cold] == case.expected
    assert [list(output.token_ids) for output in warm] == case.expected


def test_preempted_equals_uninterrupted(case: Case) -> None:
    engine = build_engine(case.loaded, TIGHT)
    assert tokens(engine, case.prompts, GREEDY) == case.expected
    assert num_preemptions(engine) > 0


def test_seeded_sampling_is_the_same_alone_batched_and_preempted(case: Case) -> None:
    alone = [tokens(build_engine(case.loaded, WHOLE), [prompt], SEEDED)[0] for prompt in case.prompts]
    assert alone != case.expected
    preempting = build_engine(case.loaded, TIGHT)
    assert tokens(preempting, case.prompts, SEEDED) == alone
    assert num_preemptions(preempting) > 0
