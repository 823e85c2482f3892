"""The replica that a request goes to, and the reason for it."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from replicas.shared_rules.block_hash import extend_hashes
from router.balancing.policy import LeastTokens, PrefixIndex
from router.types import Ranking, Reason, RoutingRequest
from testkit.router.plain_decisions import ListedCandidates, cluster_of
from testkit.router.simulated_replicas import BLOCK_SIZE, request, routing, stats, view

PROMPT = tuple(range(1, 41))


def least_tokens(seed: int = 0) -> LeastTokens:
    return LeastTokens(random.Random(seed))


def with_prefix(prompt: tuple[int, ...] = PROMPT, affinity_key: str | None = None, expected: int = 8) -> RoutingRequest:
    hashes: list[bytes] = []
    extend_hashes(hashes, prompt, BLOCK_SIZE)
    return routing(request(prompt=prompt, affinity_key=affinity_key), expected=expected, hashes=hashes)


EQUAL = [view(name, outstanding=1000) for name in "abcd"]


def test_least_outstanding_tokens_first():
    views = [view("c", outstanding=500), view("a", outstanding=900), view("b", outstanding=100)]
    assert least_tokens().rank(routing(), ListedCandidates(views)).replica_ids == ["b", "c", "a"]


def test_many_short_requests_are_less_work_than_one_long():
    views = [view("one-long", by_band=(0, 1, 0), outstanding=4000), view("short", by_band=(0, 9, 0), outstanding=300)]
    assert least_tokens().rank(routing(), ListedCandidates(views)).replica_ids == ["short", "one-long"]


def test_the_holder_of_the_prefix_is_preferred_at_similar_load():
    policy, wanted = least_tokens(), with_prefix()
    views = [view("cold", outstanding=100), view("warm", outstanding=120)]
    assert policy.rank(wanted, ListedCandidates(views)).first == "cold"
    policy.placed(wanted, "warm")
    hit = Ranking(["warm", "cold"], Reason.PREFIX_HIT)
    assert policy.rank(wanted, ListedCandidates(views)) == hit, "40 tokens saved against 20 more to wait for"
    assert policy.rank(wanted, ListedCandidates(views[1:])).reason is Reason.PREFIX_HIT, (
        "of a single one too: it computes less"
    )
    policy.forget("warm")
    assert policy.rank(wanted, ListedCandidates(views)).first == "cold", "a replica that is gone holds nothing"


def test_the_holder_of_the_prefix_has_too_much_to_do():
    policy, wanted = least_tokens(), with_prefix(tuple(range(1, 4001)))
    policy.placed(wanted, "hot")
    views = [view("hot", outstanding=4500), view("cold", outstanding=100)]
    assert policy.rank(wanted, ListedCandidates(views)) == Ranking(["cold", "hot"], Reason.PREFIX_OVERRIDDEN)


def test_the_holder_of_the_prefix_has_no_room():
    policy, wanted = least_tokens(), with_prefix()
    policy.placed(wanted, "full")
    assert policy.rank(wanted, ListedCandidates([view("cold")])).reason is Reason.PREFIX_OVERRIDDEN
    policy.forget("full")
    assert policy.rank(wanted, ListedCandidates([view("cold")])).reason is Reason.SINGLE_CANDIDATE


@pytest.mark.parametrize(
    ("wanted", "views", "reason"),
    [
        (with_prefix(), EQUAL, Reason.AFFINITY),
        (with_prefix(affinity_key="session"), EQUAL, Reason.AFFINITY),
        (routing(), [*EQUAL, view("idle", outstanding=900)], Reason.LEAST_LOADED),
        (with_prefix(affinity_key="session"), [*EQUAL, view("idle", outstanding=900)], Reason.LEAST_LOADED),
        (routing(), EQUAL, Reason.RANDOM),
        (routing(), EQUAL[:1], Reason.SINGLE_CANDIDATE),
    ],
    ids=["first block", "key", "least work", "least work before a key", "drawn", "alone"],
)
def test_a_ranking_has_a_reason(wanted, views, reason):
    ranking = least_tokens().rank(wanted, ListedCandidates(views))
    assert ranking.reason is reason
    assert ranking.first == "idle" or reason is not Reason.LEAST_LOADED


def test_a_ranking_is_led_by_the_given_replica():
    ranking = Ranking(["b", "a", "c"], Reason.RANDOM)
    assert ranking.with_first("c", Reason.SAME_PROMPT) == Ranking(["c", "b", "a"], Reason.SAME_PROMPT)
    assert ranking.with_first("d", Reason.SAME_PROMPT) == Ranking(["d", "b", "a", "c"], Reason.SAME_PROMPT)


def test_a_holder_beyond_the_load_bound_is_not_preferred():
    policy, wanted = least_tokens(), with_prefix(tuple(range(1, 4001)))
    policy.placed(wanted, "hot")
    cold = [view(name, outstanding=1000) for name in "abc"]
    # hot = 1.25 * (hot + 3 * 1000 + own) / 4
    bound = (1.25 * (3000 + wanted.num_tokens) / 4) / (1 - 1.25 / 4)
    assert policy.rank(wanted, ListedCandidates([*cold, view("hot", outstanding=int(bound) - 1)])).first == "hot"
    assert policy.rank(wanted, ListedCandidates([*cold, view("hot", outstanding=int(bound) + 1)])).first != "hot"


def test_a_lightly_loaded_holder_beats_an_idle_replica():
    policy, wanted = least_tokens(), with_prefix(tuple(range(1, 4001)))
    policy.placed(wanted, "busy")
    assert policy.rank(wanted, ListedCandidates([view("busy", outstanding=500), view("idle")])).first == "busy"


def test_a_policy_keeps_to_the_bound_of_its_index():
    """Without a prefix cache the bound is 0. An empty index is false in a condition, and must not be replaced."""
    policy, wanted = LeastTokens(random.Random(0), PrefixIndex(max_blocks=0)), with_prefix()
    policy.placed(wanted, "a")
    assert policy.placed(wanted, "a") == len(PROMPT)


def test_full_replicas_keep_their_blocks_in_the_index():
    """The index is bounded by the blocks of all replicas, also of those without room."""
    policy, wanted = least_tokens(), with_prefix(tuple(range(1, 4001)))
    policy.placed(wanted, "full")
    views = [view("full", outstanding=900), view("free", outstanding=900, of=replace(stats(), num_blocks=10))]
    policy.rank(routing(), ListedCandidates(views[1:], cluster_of(views)))
    assert policy.rank(wanted, ListedCandidates(views)) == Ranking(["full", "free"], Reason.PREFIX_HIT)


def test_placed_counts_what_is_left_of_the_prompt_to_compute():
    policy, wanted = least_tokens(), with_prefix()
    assert policy.placed(wanted, "a") == len(PROMPT)
    assert 0 < policy.placed(wanted, "a") <= BLOCK_SIZE, "all of it is there, but for the end"
    longer = with_prefix((*PROMPT, *range(100, 140)))
    assert len(PROMPT) - BLOCK_SIZE <= policy.placed(longer, "a") <= len(PROMPT) + BLOCK_SIZE
    assert policy.placed(wanted, "b") == len(PROMPT)


def test_ingresses_agree_on_the_replica_of_an_unknown_prefix():
    views = [view(f"replica-{number}", outstanding=1000) for number in range(8)]
    one, other = least_tokens(1), least_tokens(2)
    chosen: Counter[str] = Counter()
    for number in range(400):
        wanted = with_prefix((number, *range(1, 20)))
        assert (
            one.rank(wanted, ListedCandidates(views)).replica_ids
            == other.rank(wanted, ListedCandidates(views[::-1])).replica_ids
        )
        chosen[one.rank(wanted, ListedCandidates(views)).first] += 1
    assert len(chosen) == 8 and max(chosen.values()) < 100, "and different ones to different replicas"


def test_losing_a_replica_moves_only_the_prefixes_it_had():
    views = [view(f"replica-{number}") for number in range(5)]
    policy = least_tokens()
    for number in range(200):
        wanted = with_prefix((number, *range(1, 20)))
        before = policy.rank(wanted, ListedCandidates(views)).first
        after = policy.rank(wanted, ListedCandidates(views[1:])).first
        assert after == before or before == "replica-0"


def test_requests_with_one_affinity_key_go_to_one_replica():
    views = [view(f"replica-{number}", outstanding=1000) for number in range(8)]
    prompts = [(number, *range(1, 20)) for number in range(20)]
    rankings = {
        tuple(least_tokens().rank(with_prefix(p, affinity_key="session"), ListedCandidates(views)).replica_ids)
        for p in prompts
    }
    assert len(rankings) == 1
    others = {
        least_tokens().rank(with_prefix(affinity_key=f"session-{number}"), ListedCandidates(views)).first
        for number in range(100)
    }
    assert len(others) == 8


def test_affinity_decides_where_load_is_nearly_equal():
    """40 prompt tokens and 160 of output: twenty more or less to wait for is the same."""
    wanted = with_prefix(affinity_key="k", expected=160)
    equal = [view(f"replica-{number}", outstanding=1000) for number in range(6)]
    nearly = [view(f"replica-{number}", outstanding=1000 + 4 * number) for number in range(6)]
    assert (
        least_tokens().rank(wanted, ListedCandidates(nearly)).replica_ids
        == least_tokens().rank(wanted, ListedCandidates(equal)).replica_ids
    )


def test_affinity_does_not_outweigh_load():
    views = [view(f"replica-{number}", outstanding=1000) for number in range(4)]
    preferred = least_tokens().rank(with_prefix(affinity_key="k"), ListedCandidates(views)).first
    views = [view(v.stats.replica_id, outstanding=1100 if v.stats.replica_id == preferred else 1000) for v in views]
    assert least_tokens().rank(with_prefix(affinity_key="k"), ListedCandidates(views)).replica_ids[-1] == preferred


def test_ties_are_drawn_evenly_and_reproducibly():
    views = [view("a"), view("b"), view("c")]
    first = [least_tokens(7).rank(routing(), ListedCandidates(views)).replica_ids for _ in range(2)]
    assert first[0] == first[1]
    policy = least_tokens(7)
    chosen = Counter(policy.rank(routing(), ListedCandidates(views)).first for _ in range(3000))
    assert all(900 < count < 1100 for count in chosen.values())
