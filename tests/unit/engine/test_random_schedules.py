"""Random additions, steps, aborts and times over small pools: no block leaks, and every answer is right."""

import random
from dataclasses import replace

import pytest

from replicas.protocol import FinishReason, GenerateRequest
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import World, continuation
from tests.seeds import Seeds

pytestmark = pytest.mark.rotated


def new_or_resumed(rng: random.Random, world: World, number: int) -> GenerateRequest:
    new = random_request(rng, world, number)
    resumes = new.params.max_tokens > 1 and new.params.prompt_logprobs is None and rng.random() < 0.2
    num_had = rng.randint(1, new.params.max_tokens - 1) if resumes else 0
    return replace(new, output_token_ids=continuation(new.prompt_token_ids, num_had))


@pytest.mark.random_worlds(3000, per_call=250)
def test_every_block_is_free_at_the_end_and_every_answer_right(seeds: Seeds) -> None:
    num_preemptions = num_promotions = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(random_config(rng))
        for asked, outcome, is_whole in play(rng, world, new_or_resumed):
            expected = continuation(asked.prompt_token_ids, asked.params.max_tokens)
            assert tuple(outcome.token_ids) == expected[: len(outcome.token_ids)]
            if is_whole:
                assert outcome.finish_reason is FinishReason.LENGTH and len(outcome.token_ids) == len(expected)
                scored = asked.prompt_token_ids[1:] if asked.params.prompt_logprobs is not None else ()
                assert tuple(entry.chosen.token_id for entry in outcome.prompt_logprobs) == scored
        num_preemptions += world.engine._scheduler.num_preemptions
        num_promotions += world.engine._scheduler.num_promotions
    if seeds.are_many:
        assert num_preemptions > 100 and num_promotions > 10, "the worlds do not reach what they should test"
