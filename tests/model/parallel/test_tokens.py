"""Several ranks give the tokens of one process: in batches, chunks, prefix hits and preemptions, however sampled."""

from collections.abc import Iterator

import pytest

from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    num_preemptions,
    random_prompts,
    run,
    tokens,
)
from testkit.model.planned_gather import PlannedGather
from testkit.model.rank_threads import Ranks, following, load_parts
from tests.model.cuda_graphs.test_step_messages import every_kind
from tests.model.cuda_graphs.test_steps_ahead import TIGHT, check_same

pytestmark = pytest.mark.rotated

NUM_OUTPUT_TOKENS = 16
PROMPTS = random_prompts((5, 33, 60, 90))
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, top_p=0.95, seed=7)
ARCHITECTURES = (
    "llama", "mistral-window", "qwen2", "qwen3", "phi3", "gemma2-window", "gemma3_text-window", "glm4", "mixtral",
    "qwen2_moe", "qwen3_moe", "gpt_oss-window", "deepseek_v3", "qwen3_5_text", "qwen3_5_text-48", "qwen3_5_moe_text",
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_give_the_tokens_of_one_process(architecture: str, num_ranks: int) -> None:
    """With four ranks, two hold the same KV head."""
    expected = cached_reference(architecture, PROMPTS, NUM_OUTPUT_TOKENS)
    parts = load_parts(cached_checkpoint(architecture), num_ranks)
    with following(parts, Sizes(num_blocks=54, block_size=4)) as ranks:
        engine = ranks.engine()
        assert tokens(engine, PROMPTS, GREEDY) == expected
        assert num_preemptions(engine) > 0


@pytest.fixture(scope="module", params=[None, PlannedGather], ids=["plain", "padded"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    parts = load_parts(cached_checkpoint("llama", with_tokenizer=True), 2)
    with following(parts, TIGHT, planned=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("is_ahead", [False, True])
def test_requests_of_every_kind_give_the_same_twice(ranks: Ranks, is_ahead: bool) -> None:
    """The second run has prefix hits."""
    expected = run(build_engine(load(cached_checkpoint("llama", with_tokenizer=True))), every_kind())
    engine = ranks.engine(is_ahead=is_ahead)
    for _ in range(2):
        check_same(run(engine, every_kind()), expected)
