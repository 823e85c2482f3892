"""Random worlds: engines with small random limits, and random requests, steps, aborts and deadlines in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from replicas.engine.config import EngineConfig, EngineLimits, KVPressurePolicy, sequence_blocks
from replicas.errors import DeadlineExceeded, Overloaded
from replicas.protocol import Band, FinishReason, GenerateRequest
from testkit.engine.shadow_runner import Outcome, World, config, request


def random_config(rng: random.Random, **changes: object) -> EngineConfig:
    windows = changes.setdefault("windows", (None,))
    assert isinstance(windows, tuple)
    num_blocks, block_size = rng.randint(3, 14), rng.choice([1, 2, 4, 5])
    max_num_seqs = rng.randint(1, 5)
    limits = EngineLimits(block_size, max_num_seqs, max_num_seqs + rng.randint(1, 8))
    num_blocks *= len(windows)
    longest = sequence_blocks(limits, windows, is_asynchronous=True).num_tokens(num_blocks)
    return config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=rng.randint(2, min(longest, 70)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_partial_prefills=rng.randint(1, 3),
        enable_prefix_caching=rng.random() < 0.8,
        kv_pressure_policy=rng.choice(list(KVPressurePolicy)),
        max_queued_requests=rng.choice([2, 100]),
        promote_after_s=rng.choice([0.5, 5.0, 1000.0]),
        fairness_rest_steps=rng.choice([1, 8, 64]),
        **{"tpot_targets_s": rng.choice([(None, None, None), (0.1, 0.2, None)])} | changes,
    )


def random_request(rng: random.Random, world: World, number: int, **params: object) -> GenerateRequest:
    """Return a request that fits, of random length and band; it may have a deadline, score its prompt or run alone."""
    room = world.config.max_model_len
    prompt = tuple(rng.choice([1, 2]) for _ in range(rng.randint(1, room - 1)))
    deadline = world.clock.unix(world.clock.now + rng.uniform(0, 20)) if rng.random() < 0.15 else None
    max_tokens = 0 if rng.random() < 0.05 else rng.randint(1, room - len(prompt))
    prompt_logprobs = 0 if max_tokens == 0 or rng.random() < 0.1 else None
    band = rng.choice(list(Band))
    made = request(f"r{number}", prompt, max_tokens, band, deadline, prompt_logprobs=prompt_logprobs, **params)  # type: ignore[arg-type]
    is_isolated, is_promoted = rng.random() < 0.05, rng.random() < 0.05
    return replace(
        made, is_isolated=is_isolated, is_promoted=is_promoted, tenant=rng.choice("aaab"), ingress_id=rng.choice("xy")
    )


def play(
    rng: random.Random, world: World, make_request: Callable[[random.Random, World, int], GenerateRequest]
) -> Iterator[tuple[GenerateRequest, Outcome, bool]]:
    """Play a world to its end, checking invariants; yield each request, its outcome, and True if it must be whole.

    The outcome of an aborted request, or of one past its deadline, is not whole.
    """
    requests: dict[str, GenerateRequest] = {}
    aborted: set[str] = set()
    for _ in range(rng.randint(20, 60)):
        _act(rng, world, requests, aborted, make_request)
        world.engine.check_invariants()
    world.run()
    for name, asked in requests.items():
        outcome = world.outcomes[name]
        if name in aborted:
            assert outcome.finish_reason is None
        elif outcome.finish_reason is FinishReason.ERROR:
            assert outcome.last is not None and isinstance(outcome.last.error, DeadlineExceeded)
            assert asked.deadline_unix_s is not None
        yield asked, outcome, name not in aborted and outcome.finish_reason is not FinishReason.ERROR


def _act(
    rng: random.Random,
    world: World,
    requests: dict[str, GenerateRequest],
    aborted: set[str],
    make_request: Callable[[random.Random, World, int], GenerateRequest],
) -> None:
    choice = rng.random()
    if choice < 0.33:
        new = make_request(rng, world, len(requests))
        try:
            world.add(new)
        except Overloaded:
            assert world.engine.stats().num_waiting >= world.config.max_queued_requests
        else:
            requests[new.request_id] = new
    elif choice < 0.4 and requests:
        victim = rng.choice(list(requests))
        if world.outcomes[victim].finish_reason is None:
            aborted.add(victim)
        world.engine.abort(victim)
    else:
        world.clock.now += rng.uniform(0, 0.5)
        world.step()
