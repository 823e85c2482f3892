"""Models with recurrent layers: the output is that of `generate()`, and depends on the request alone.

Their states must survive chunks, neighbours, hits, preemptions and repeated steps.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from replicas.engine.batch import LaunchedStep, ScheduledBatch, StepResults
from replicas.engine.engine import Engine
from replicas.model.attention.cpp import CppAttention
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import Dtype
from replicas.model.runner import TorchModelRunner
from replicas.protocol import GenerateRequest, SamplingParams, TokenDelta
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    engine_over,
    load,
    load_compiled,
    make_runner,
    num_preemptions,
    random_prompts,
    requests_for,
    run,
    tokens,
)
from testkit.model.planned_gather import PlannedGather
from testkit.model.tiny_checkpoints import HYBRIDS

pytestmark = pytest.mark.rotated

NUM_TOKENS = 64
PROMPTS = random_prompts((33, 90, 5))
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=7, logprobs=2)
KINDS = ("qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2_moe")
WHOLE = Sizes(max_num_batched_tokens=512)
TIGHT = Sizes(num_blocks=17, num_state_slots=7)
SAME_BITS = ("qwen3_5_text-16", "qwen3_5_text-48", "olmo_hybrid", "bamba", "lfm2")
"""Models whose numbers are compared, and not only tokens. Their numbers of heads are no multiples of 32."""


@pytest.fixture(scope="module", params=HYBRIDS)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class RepeatingRunner:
    """Runner that computes every step twice."""

    runner: TorchModelRunner

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.runner.execute(batch)
        return self.runner.launch(batch)


@dataclass
class FailingStep:
    """Step that is computed, and of which the results are lost."""

    step: LaunchedStep

    def sample(self) -> None:
        self.step.sample()

    def collect(self) -> StepResults:
        self.step.collect()
        raise RuntimeError("the device failed")


@dataclass
class FailingRunner:
    """Runner of which every third step fails. The engine repeats its items, and revokes the step launched behind it."""

    runner: TorchModelRunner
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_failed: int = 0
    num_sound: int = 0

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        step = self.runner.launch(batch)
        self.num_sound -= 1
        if self.num_sound >= 0 or self.rng.random() < 0.5:
            return step
        self.num_failed += 1
        self.num_sound = 2 * len(batch.items) + 2  # The repetitions succeed.
        return FailingStep(step)


def outputs(engine: Engine, params: SamplingParams = SEEDED) -> list[TokenDelta]:
    return run(engine, requests_for(PROMPTS, params))


def numbers(results: list[TokenDelta]) -> list[list[tuple[int, list[float]]]]:
    """Return the tokens of each result, each with the log probabilities at it."""
    assert all(result.error is None for result in results)
    return [
        [
            (entry.chosen.token_id, [entry.chosen.logprob, *(top.logprob for top in entry.top)])
            for entry in result.logprobs
        ]
        for result in results
    ]


def alone(loaded: LoadedModel) -> list[list[tuple[int, list[float]]]]:
    requests = requests_for(PROMPTS, SEEDED)
    return numbers([run(build_engine(loaded, WHOLE, CppAttention), [request])[0] for request in requests])


@pytest.mark.sampled(4)
def test_output_is_that_of_generate_in_chunks_with_neighbours_and_preemptions(architecture: str) -> None:
    expected = cached_reference(architecture, PROMPTS, NUM_TOKENS)
    assert len({token for output in expected for token in output}) >= 20
    engine = build_engine(load(cached_checkpoint(architecture)), TIGHT)
    assert tokens(engine, PROMPTS, GREEDY) == expected
    assert num_preemptions(engine) > 0
    stats = engine.stats()
    assert stats.num_free_state_slots == stats.num_state_slots == 7


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "architecture",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.deep) for name in HYBRIDS],
)
def test_hits_and_steps_ahead_that_fail_change_no_token(architecture: str) -> None:
    expected = cached_reference(architecture, PROMPTS, NUM_TOKENS)
    loaded, sizes = load(cached_checkpoint(architecture)), Sizes(max_num_batched_tokens=50)
    runner = make_runner(loaded, sizes)
    failing = FailingRunner(runner)
    engine = engine_over(runner, loaded, sizes, is_ahead=True, launcher=failing)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    cold, warm = outputs(engine, params), outputs(engine, params)
    assert [result.usage.cached_tokens for result in warm] == [32, 80, 0]
    for results in (cold, warm):
        assert [list(result.token_ids) for result in results] == [output[:40] for output in expected]
    assert failing.num_failed > 5


@pytest.mark.parametrize(
    "architecture",
    [name if name == "qwen3_5_text-16" else pytest.param(name, marks=pytest.mark.deep) for name in HYBRIDS],
)
def test_padded_steps_ahead_change_no_token(architecture: str) -> None:
    expected = cached_reference(architecture, PROMPTS, NUM_TOKENS)
    loaded = load(cached_checkpoint(architecture))
    engine = build_engine(loaded, TIGHT, planned=PlannedGather, is_ahead=True)
    for params in (GREEDY, replace(GREEDY, prompt_logprobs=1)):
        assert tokens(engine, PROMPTS, params) == expected


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("kernels")
def test_kernels_give_the_tokens_of_generate(architecture: str) -> None:
    expected = cached_reference(architecture, PROMPTS, NUM_TOKENS)
    engine = build_engine(load_compiled(cached_checkpoint(architecture)), TIGHT, CppAttention)
    assert tokens(engine, PROMPTS, GREEDY) == expected
    assert num_preemptions(engine) > 0


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", SAME_BITS)
def test_every_schedule_gives_the_same_numbers(architecture: str, dtype: Dtype) -> None:
    loaded = load_compiled(cached_checkpoint(architecture), dtype)
    expected = alone(loaded)
    tight = build_engine(loaded, Sizes(num_blocks=10, num_state_slots=7), CppAttention)
    assert numbers(outputs(tight)) == expected
    assert num_preemptions(tight) > 0
    sizes = Sizes(max_num_batched_tokens=9)
    runner = make_runner(loaded, sizes, CppAttention)
    engine = engine_over(runner, loaded, sizes, launcher=RepeatingRunner(runner))
    assert numbers(outputs(engine)) == expected
    assert numbers(outputs(engine)) == expected


@pytest.mark.parametrize(
    "architecture",
    [
        name if name == "nemotron_h" else pytest.param(name, marks=pytest.mark.deep)
        for name in HYBRIDS
        if name not in SAME_BITS
    ],
)
def test_seeded_tokens_are_those_of_the_sequence_alone(architecture: str) -> None:
    loaded, sizes = load(cached_checkpoint(architecture)), Sizes(num_blocks=10, num_state_slots=7)
    requests = requests_for(PROMPTS, SEEDED)
    expected = [run(build_engine(loaded, WHOLE), [request])[0].token_ids for request in requests]
    runner = make_runner(loaded, sizes)
    engine = engine_over(runner, loaded, sizes, launcher=RepeatingRunner(runner))
    for _ in "ab":
        assert [output.token_ids for output in run(engine, requests)] == expected
    assert num_preemptions(engine) > 0


def test_the_next_turn_hits_up_to_what_the_template_changes() -> None:
    """The template drops the reasoning of earlier turns, so a turn's prompt differs from the last one near its end."""
    loaded = load(cached_checkpoint("qwen3_5_text-16"))
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=64, num_state_slots=40))
    rng = random.Random(3)
    history: list[int] = []
    before: tuple[int, ...] = ()
    for turn in range(12):
        history += [5, *(rng.randrange(9, 500) for _ in range(rng.randrange(6, 16))), 6]
        prompt = (*history, 7, 8)  # 8 begins the reasoning.
        params = SamplingParams(max_tokens=4, temperature=0.0)
        (result,) = run(engine, [GenerateRequest(f"turn-{turn}", prompt, params)])
        same = next((i for i, (old, new) in enumerate(zip(before, prompt, strict=False)) if old != new), len(before))
        assert result.usage.cached_tokens >= same - 32, "the hit ends too early"
        before = (*prompt, *result.token_ids)
        history += [7, *result.token_ids[2:]]
    assert result.usage.cached_tokens > 100
