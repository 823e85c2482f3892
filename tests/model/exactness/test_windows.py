"""Models with sliding windows: blocks behind a window are given back, and the output is that of `generate()`."""

import pytest

from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.kv_cache import KVCache
from replicas.model.cuda_graphs.graphs import PlannedAttention
from replicas.model.runner import TorchModelRunner
from replicas.protocol import SamplingParams, TokenDelta
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
from tests.model.exactness.test_hybrids import FailingRunner, RepeatingRunner, numbers

pytestmark = pytest.mark.rotated

NUM_TOKENS = 48
PROMPTS = random_prompts((90, 130, 7))
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=7, logprobs=2)
KINDS = {
    "mistral-window": (1, 5),
    "gemma2-window": (3, 21),
    "gpt_oss-window": (3, 21),
    "gemma4_text-window": (3, 21),
    "gemma4_text-shared": (2, 16),
}
"""Models, with the number of block tables and a number of blocks that is too small for all prompts together."""


@pytest.fixture(scope="module", params=KINDS)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def token_ids(results: list[TokenDelta]) -> list[list[int]]:
    assert all(result.error is None for result in results)
    return [list(result.token_ids) for result in results]


@pytest.mark.sampled(2)
def test_output_is_that_of_generate_in_chunks_with_neighbours_and_preemptions(architecture: str) -> None:
    expected = cached_reference(architecture, PROMPTS, NUM_TOKENS)
    num_tables, num_blocks = KINDS[architecture]
    engine = build_engine(
        load(cached_checkpoint(architecture)), Sizes(num_blocks, max_num_batched_tokens=20, gives_back=True)
    )
    assert tokens(engine, PROMPTS, GREEDY) == expected
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.num_whole_tables) == (stats.num_blocks, min(1, num_tables - 1))
    assert len(stats.most_window_blocks) + stats.num_whole_tables == num_tables
    assert num_preemptions(engine) > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("planned", [None, PlannedGather], ids=["eager", "padded"])
def test_hits_and_steps_ahead_that_fail_change_no_token(architecture: str, planned: PlannedAttention | None) -> None:
    expected = cached_reference(architecture, PROMPTS, NUM_TOKENS)
    loaded, sizes = (
        load(cached_checkpoint(architecture)),
        Sizes(num_blocks=100, max_num_batched_tokens=30, gives_back=True),
    )
    runner = make_runner(loaded, sizes, planned=planned)
    failing = FailingRunner(runner)
    engine = engine_over(runner, loaded, sizes, is_ahead=True, launcher=failing)
    cold, warm = (run(engine, requests_for(PROMPTS, GREEDY)) for _ in "ab")
    # The blocks that the last prompt token sees are still cached.
    assert [result.usage.cached_tokens for result in warm] == [80, 128, 0]
    assert token_ids(cold) == token_ids(warm) == expected
    assert failing.num_failed > 5


@pytest.mark.sampled(1)
def test_steps_that_run_twice_change_no_token(architecture: str) -> None:
    loaded, sizes = load(cached_checkpoint(architecture)), Sizes(max_num_batched_tokens=30, gives_back=True)
    runner = make_runner(loaded, sizes)
    engine = engine_over(runner, loaded, sizes, launcher=RepeatingRunner(runner))
    assert tokens(engine, PROMPTS, GREEDY) == cached_reference(architecture, PROMPTS, NUM_TOKENS)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", ["mistral-window", "gemma3_text-window", "gemma4_text-shared"])
def test_every_number_is_that_of_a_cache_that_keeps_the_whole_length(architecture: str) -> None:
    loaded, sizes = load_compiled(cached_checkpoint(architecture)), Sizes(max_num_batched_tokens=30, gives_back=True)
    whole = KVCache(loaded.layers, sizes.num_blocks, sizes.block_size, loaded.dtype, loaded.device)
    runners = [TorchModelRunner(loaded, whole, CppAttention), make_runner(loaded, sizes, CppAttention)]
    assert runners[0].windows == (None,) and runners[1].windows[0] == 24
    outputs = [run(engine_over(runner, loaded, sizes), requests_for(PROMPTS, SEEDED)) for runner in runners]
    assert numbers(outputs[0]) == numbers(outputs[1])
