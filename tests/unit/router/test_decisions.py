"""Why a request went where it went."""

from __future__ import annotations

import pytest

from router.flow_control import SampleGroup
from router.types import Ranking, Reason
from tests.unit.router.fakes import routing, stats, view
from tests.unit.router.flows import Flow
from tests.unit.router.simulated_time import settle_down
from tests.unit.router.test_policy import least_tokens, with_prefix

EQUAL = [view(name, outstanding=1000) for name in "abcd"]


def test_it_holds_the_prefix():
    policy, wanted = least_tokens(), with_prefix()
    policy.placed(wanted, "warm")
    views = [view("cold", outstanding=100), view("warm", outstanding=120)]
    assert policy.rank(wanted, views) == Ranking(["warm", "cold"], Reason.PREFIX_HIT)
    assert policy.rank(wanted, views[1:]).reason is Reason.PREFIX_HIT, "of a single one too: it computes less"


def test_the_holder_of_the_prefix_has_too_much_to_do():
    policy, wanted = least_tokens(), with_prefix(tuple(range(1, 4001)))
    policy.placed(wanted, "hot")
    views = [view("hot", outstanding=4500), view("cold", outstanding=100)]
    assert policy.rank(wanted, views) == Ranking(["cold", "hot"], Reason.PREFIX_OVERRIDDEN)


def test_the_holder_of_the_prefix_has_no_room():
    policy, wanted = least_tokens(), with_prefix()
    policy.placed(wanted, "full")
    assert policy.rank(wanted, [view("cold")]).reason is Reason.PREFIX_OVERRIDDEN
    policy.forget("full")
    assert policy.rank(wanted, [view("cold")]).reason is Reason.ONLY_ONE


@pytest.mark.parametrize("affinity_key", [None, "session"])
def test_its_key_or_its_first_block_chooses_among_equals(affinity_key: str | None):
    assert least_tokens().rank(with_prefix(affinity_key=affinity_key), EQUAL).reason is Reason.AFFINITY


def test_it_has_the_least_to_do():
    views = [*EQUAL, view("idle", outstanding=900)]
    for wanted in (routing(), with_prefix(affinity_key="session")):
        ranking = least_tokens().rank(wanted, views)
        assert (ranking.first, ranking.reason) == ("idle", Reason.LEAST_LOADED)


def test_it_was_drawn_and_no_key_chose():
    assert least_tokens().rank(routing(), EQUAL).reason is Reason.DRAWN
    assert least_tokens().rank(routing(), EQUAL[:1]).reason is Reason.ONLY_ONE


def test_a_ranking_is_led_only_by_one_that_is_in_it():
    ranking = Ranking(["b", "a", "c"], Reason.DRAWN)
    assert ranking.led_by("c", Reason.SAME_PROMPT) == Ranking(["c", "b", "a"], Reason.SAME_PROMPT)
    assert ranking.led_by("gone", Reason.SAME_PROMPT) is ranking
    assert ranking.led_by(None, Reason.SAME_PROMPT) is ranking


async def test_every_dispatch_is_told_with_its_reason():
    flow = Flow()
    flow.report(stats("a"), stats("b"))
    group = SampleGroup()
    asked = [flow.ask(group=group, prompt=tuple(range(1, 41)), seed=number) for number in range(3)]
    await settle_down()
    assert flow.observer.decisions == [Reason.AFFINITY, Reason.SAME_PROMPT, Reason.SAME_PROMPT]
    for placed in asked:
        flow.settle(placed)
    await flow.ask_many(1, prompt=(*range(1, 41), 50, 51))
    assert flow.observer.decisions[3:] == [Reason.PREFIX_HIT]


async def test_what_waits_has_had_no_decision():
    flow = Flow()
    flow.report(stats(slots=1))
    await flow.ask_many(3)
    assert flow.observer.decisions == [Reason.ONLY_ONE]
