"""What a client is told of the room in its band."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from replicas.errors import Overloaded
from replicas.protocol import Band
from router.flow_control import FlowLimits
from router.flow_queue import BandLimits
from router.types import Headroom
from tests.unit.router.fakes import FakeReplica, stats
from tests.unit.router.flows import Flow, limits
from tests.unit.router.simulated_time import settle_down
from tests.unit.router.worlds import World

EMPTY = Headroom(max_requests=3, num_requests=0, max_tokens=100, num_tokens=0, wait_s=None)


async def test_it_is_what_the_band_may_hold_less_what_waits():
    flow = Flow(limits(max_requests=3, max_tokens=100))
    assert flow.controller.headroom(Band.STANDARD) == EMPTY
    flow.report(stats(slots=1, rate=2.0, running=(1, 0, 0)))
    await flow.ask_many(2)
    standard = flow.controller.headroom(Band.STANDARD)
    assert standard == Headroom(max_requests=3, num_requests=2, max_tokens=100, num_tokens=22, wait_s=11.0)
    assert (standard.num_requests_left, standard.num_tokens_left, standard.reset_s) == (1, 78, 11.0)
    assert flow.controller.headroom(Band.INTERACTIVE) == replace(EMPTY, wait_s=0.0)


@pytest.mark.parametrize("max_tokens", [25, 10**6])
async def test_as_many_as_are_left_are_accepted(max_tokens: int):
    flow = Flow(limits(max_requests=7, max_tokens=max_tokens))
    flow.report(stats(slots=1))
    await flow.ask_many(1)
    while flow.controller.headroom(Band.STANDARD).num_requests_left and (
        flow.controller.headroom(Band.STANDARD).num_tokens_left >= 11
    ):
        flow.ask()
        await settle_down()
    with pytest.raises(Overloaded):
        flow.ask()


async def test_none_are_left_where_the_wait_would_be_too_long():
    band_limits = BandLimits(max_requests=100, max_tokens=10_000, max_wait_s=5.0)
    flow = Flow(FlowLimits(dict.fromkeys(Band, band_limits), promote_after_s=30.0))
    flow.report(stats(slots=1, rate=10.0, running=(1, 0, 0)))
    for _ in range(20):
        with suppress(Overloaded):
            flow.ask()
        await settle_down()
    headroom = flow.controller.headroom(Band.STANDARD)
    assert 0 < headroom.num_requests < 20
    assert (headroom.num_requests_left, headroom.num_tokens_left) == (0, 0)


def test_what_waits_beyond_the_limits_leaves_nothing():
    over = Headroom(max_requests=3, num_requests=5, max_tokens=100, num_tokens=170, wait_s=None)
    assert (over.num_requests_left, over.num_tokens_left, over.reset_s) == (0, 0, None)


def test_an_empty_band_has_nothing_to_wait_for():
    assert EMPTY.reset_s == 0.0
    assert replace(EMPTY, wait_s=7.0).reset_s == 0.0, "what waits above it is not its own"


def test_nothing_may_wait_behind_what_takes_too_long():
    behind = replace(EMPTY, wait_s=7.0, max_wait_s=5.0)
    assert (behind.num_requests_left, behind.num_tokens_left, behind.reset_s) == (0, 0, 7.0)


async def test_each_limit_refuses_under_its_own_name():
    band_limits = BandLimits(max_requests=3, max_tokens=40, max_wait_s=10.0)
    flow = Flow(FlowLimits(dict.fromkeys(Band, band_limits), promote_after_s=30.0))
    flow.report(stats(slots=1, rate=2.0))
    await flow.ask_many(3, Band.INTERACTIVE)

    def refused(**asked: Any) -> tuple[str, str]:
        with pytest.raises(Overloaded) as refusal:
            flow.ask(**asked)
        return refusal.value.reason, refusal.value.code

    assert refused(band=Band.STANDARD, within_s=5.0) == ("deadline", "slow_down")
    assert refused(band=Band.STANDARD) == ("max_predicted_wait", "server_overloaded")
    assert refused(band=Band.INTERACTIVE, max_tokens=30) == ("max_num_queued_tokens", "server_overloaded")
    other = Flow(limits(max_requests=3))
    await other.ask_many(3)
    with pytest.raises(Overloaded) as refusal:
        other.ask()
    assert refusal.value.reason == "max_num_queued_reqs"


async def test_the_dispatcher_passes_it_on():
    world = World(FakeReplica("a"), limits=limits(max_requests=3))
    assert world.dispatcher.headroom(Band.BATCH) == world.flow.headroom(Band.BATCH)
