"""Random add, step, abort and time over small pools: nothing leaks, nothing stale is read, nothing is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from replicas.engine.config import EngineConfig, KVPressurePolicy
from replicas.errors import DeadlineExceeded, Overloaded
from replicas.protocol import Band, FinishReason, GenerateRequest
from testkit.engine.shadow_runner import World, config, continuation, request
from tests.seeds import Seeds


def random_config(rng: random.Random) -> EngineConfig:
    num_blocks, block_size = rng.randint(3, 14), rng.choice([1, 2, 4, 5])
    max_num_seqs = rng.randint(1, 5)
    return config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=rng.randint(2, num_blocks * block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(1, 8),
        max_num_partial_prefills=rng.randint(1, 3),
        enable_prefix_caching=rng.random() < 0.8,
        kv_pressure_policy=rng.choice(list(KVPressurePolicy)),
        max_queued_requests=rng.choice([2, 100]),
        promote_after_s=rng.choice([0.5, 5.0, 1000.0]),
    )


def random_request(rng: random.Random, world: World, number: int) -> GenerateRequest:
    limit = world.config.max_model_len
    prompt = tuple(rng.choice([1, 2]) for _ in range(rng.randint(1, limit - 1)))
    deadline = world.clock.unix(world.clock.now + rng.uniform(0, 20)) if rng.random() < 0.2 else None
    scores_only = rng.random() < 0.1
    max_tokens = 0 if scores_only else rng.randint(1, limit - len(prompt))
    has_scores = scores_only or rng.random() < 0.1
    new = request(
        f"r{number}", prompt, max_tokens, rng.choice(list(Band)), deadline, prompt_logprobs=0 if has_scores else None
    )
    resumes = max_tokens > 1 and not has_scores and rng.random() < 0.2
    output = continuation(prompt, rng.randint(1, max_tokens - 1)) if resumes else ()
    return replace(new, output_token_ids=output, is_isolated=rng.random() < 0.05)


def act(rng: random.Random, world: World, requests: dict[str, GenerateRequest], aborted: set[str]) -> None:
    choice = rng.random()
    if choice < 0.35:
        new = random_request(rng, world, len(requests))
        try:
            world.add(new)
        except Overloaded:
            assert world.engine.stats().num_waiting >= world.config.max_queued_requests
            return
        requests[new.request_id] = new
    elif choice < 0.42 and requests:
        victim = rng.choice(list(requests))
        if world.outcomes[victim].finish_reason is None:
            aborted.add(victim)
        world.engine.abort(victim)
    else:
        world.clock.now += rng.uniform(0, 0.5)
        world.step()


def check_outcome(world: World, asked: GenerateRequest, was_aborted: bool) -> None:
    outcome = world.outcomes[asked.request_id]
    expected = continuation(asked.prompt_token_ids, asked.params.max_tokens)
    assert tuple(outcome.token_ids) == expected[: len(outcome.token_ids)]
    if was_aborted:
        assert outcome.finish_reason is None
        return
    assert outcome.last is not None
    if outcome.finish_reason is FinishReason.ERROR:
        assert isinstance(outcome.last.error, DeadlineExceeded) and asked.deadline_unix_s is not None
        return
    assert outcome.finish_reason is FinishReason.LENGTH
    assert len(outcome.token_ids) == asked.params.max_tokens
    if asked.params.prompt_logprobs is not None:
        assert [entry.chosen.token_id for entry in outcome.prompt_logprobs] == list(asked.prompt_token_ids[1:])


@pytest.mark.random_worlds(3000, per_call=250)
def test_every_block_is_free_at_the_end_and_every_answer_right(seeds: Seeds) -> None:
    num_preemptions = num_promotions = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(random_config(rng))
        requests: dict[str, GenerateRequest] = {}
        aborted: set[str] = set()
        for _ in range(rng.randint(20, 60)):
            act(rng, world, requests, aborted)
            world.engine.check_invariants()
        world.run()
        for asked in requests.values():
            check_outcome(world, asked, asked.request_id in aborted)
        num_preemptions += world.engine._scheduler.num_preemptions
        num_promotions += world.engine._scheduler.num_promotions
    if seeds.are_many:
        assert num_preemptions > 100 and num_promotions > 10, "the worlds do not reach what they should test"
