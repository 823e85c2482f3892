"""Admission: refusals by predicted wait and by limits, the reported headroom, and expected output."""

import asyncio
import itertools
import random
from contextlib import suppress
from dataclasses import replace

import pytest

import router.flow.admission as module
from replicas.errors import DeadlineExceeded, Overloaded
from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.flow.admission import OutputLengths
from router.flow.flow_control import FlowController
from router.flow.flow_queue import QueuedRequest
from router.types import Headroom, Outcome
from testkit.router.dispatch_worlds import World
from testkit.router.flow_worlds import Flow, limits
from testkit.router.simulated_replicas import FakeObserver, FakeReplica, request, stats
from testkit.router.simulated_time import settle_down

FORGOTTEN_S = 5.1
"""Time after which requested tokens no longer count in the predicted wait, seconds."""
EMPTY = Headroom(max_requests=3, num_requests=0, max_tokens=100, num_tokens=0, wait_s=None)


@pytest.mark.parametrize("band", Band)
async def test_a_full_band_refuses_with_a_retry_time(band: Band):
    flow = Flow(stats(slots=1, rate=2.0, waiting=(0, 0, 1)), max_requests=3, max_tokens=100)
    await flow.ask_one(Band.INTERACTIVE)
    await asyncio.sleep(FORGOTTEN_S)
    await flow.ask_many(3, band)
    with pytest.raises(Overloaded, match=f"3 {band.name.lower()} requests wait; the limit is 3") as refusal:
        flow.ask(band)
    assert (refusal.value.retry_after_s, refusal.value.reason) == (3 * 11 / 2.0, "max_num_queued_reqs")
    assert flow.observer.waits[1:] == [(band, Outcome.REJECTED_CAPACITY, 0.0)]
    assert len(flow.controller.queue) == 3


async def test_a_full_band_refuses_by_tokens_too():
    flow = Flow(max_tokens=100)
    first = await flow.ask_one(max_tokens=60)
    with pytest.raises(Overloaded, match=r"63 tokens of standard requests wait .* 53; the limit is 100"):
        flow.ask(max_tokens=50)
    first.task.cancel()
    await settle_down()
    assert flow.ask(max_tokens=50)


async def test_predicted_wait_is_work_at_or_above_the_band_by_rate():
    flow = Flow()
    assert flow.controller.admission.wait_s(Band.BATCH, "t") is None
    flow.report(stats("a", rate=10.0, waiting=(0, 0, 1)), stats("b", rate=30.0, waiting=(0, 0, 1)))
    await flow.ask_many(8, Band.INTERACTIVE)
    assert flow.controller.admission.wait_s(Band.BATCH, "t") == 0.0
    await flow.ask_many(2, Band.INTERACTIVE, max_tokens=17)
    await flow.ask_many(3, Band.STANDARD, max_tokens=37)
    await flow.ask_many(4, Band.BATCH, max_tokens=97)
    await asyncio.sleep(FORGOTTEN_S)
    assert [flow.controller.admission.wait_s(band, "t") for band in Band] == [1.0, 4.0, 14.0]


async def test_a_predicted_start_after_the_deadline_is_refused():
    flow = Flow(stats(rate=10.0, running=(4, 0, 0), slots=4))
    await flow.ask_many(5, max_tokens=17)
    with pytest.raises(Overloaded, match=r"start in about 10.0 s and its deadline is in 9.000 s") as refusal:
        flow.ask(within_s=9.0)
    assert (refusal.value.reason, refusal.value.code, refusal.value.retry_after_s) == ("deadline", "slow_down", 10.0)
    assert flow.ask(within_s=11.0)
    assert flow.ask(Band.INTERACTIVE, within_s=0.5), "nothing waits before it"


async def test_a_deadline_that_passed_before_arrival_has_its_own_error():
    flow = Flow(stats(rate=10.0, running=(4, 0, 0), slots=4))
    await flow.ask_many(5, max_tokens=17)
    for within_s in (0.0, -0.01):
        with pytest.raises(DeadlineExceeded, match="passed before it was queued"):
            flow.ask(within_s=within_s)


async def test_a_passed_deadline_is_never_told_as_negative():
    reads = itertools.count(0.0, 0.001)
    table = LoadTable(lambda: next(reads))
    table.record(stats(rate=10.0, running=(4, 0, 0), slots=4, waiting=(0, 1, 0)))
    controller = FlowController(limits(), table, LeastTokens(random.Random(0)), FakeObserver())
    controller.queue.add(QueuedRequest(request("first"), 1000, None, 0), table.now())
    for within_s in (0.0, 0.0025, 0.0035, 0.5):
        with pytest.raises((DeadlineExceeded, Overloaded)) as refusal:
            controller.admit(request(), table.now() + within_s)
        assert "-" not in str(refusal.value)


async def test_a_predicted_wait_beyond_the_bands_limit_is_refused():
    flow = Flow(stats(slots=1, rate=10.0, running=(1, 0, 0)), max_predicted_wait_s=20.0)
    await flow.ask_many(4, Band.STANDARD, max_tokens=47)
    await flow.ask_one(Band.STANDARD, max_tokens=7)
    with pytest.raises(Overloaded, match=r"start in about 21\.0 s; the limit for standard is 20 s") as refusal:
        flow.ask(Band.STANDARD)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("max_predicted_wait", 21.0)
    assert flow.ask(Band.INTERACTIVE)


async def test_arriving_urgent_work_counts_in_the_predicted_wait():
    flow = Flow(stats(slots=2, rate=40.0, running=(1, 0, 0)))
    await flow.ask_one(Band.INTERACTIVE, max_tokens=97)
    await flow.ask_many(2, Band.STANDARD, max_tokens=47)
    assert flow.controller.admission.wait_s(Band.INTERACTIVE, "t") == 0.0
    assert flow.controller.admission.wait_s(Band.STANDARD, "t") == 100 / (40.0 - 100 / 4.0)
    await asyncio.sleep(FORGOTTEN_S)
    assert flow.controller.admission.wait_s(Band.STANDARD, "t") == 100 / 40.0
    await flow.ask_many(9, Band.INTERACTIVE, max_tokens=97)
    assert flow.controller.admission.wait_s(Band.STANDARD, "t") == pytest.approx(1000 / (0.02 * 40.0)), (
        "some is always left"
    )


async def test_the_retry_time_covers_only_predictable_work():
    flow = Flow(stats(slots=1, rate=40.0, running=(1, 0, 0)), max_predicted_wait_s=20.0)
    await flow.ask_one(Band.STANDARD, max_tokens=77)
    await flow.ask_many(9, Band.INTERACTIVE, max_tokens=17)
    with pytest.raises(Overloaded, match="start in about 300") as refusal:
        flow.ask(Band.STANDARD)
    assert refusal.value.retry_after_s == (80 + 8 * 20) / 40.0 + 4.0  # one of the nine waits in the replica


async def test_refused_urgent_work_counts_in_predicted_waits():
    flow = Flow(stats(slots=1, rate=100.0), max_requests=1)
    await flow.ask_many(2, Band.INTERACTIVE, max_tokens=47)
    waiting = await flow.ask_one(Band.STANDARD, max_tokens=47)
    assert flow.controller.admission.wait_s(Band.STANDARD, "t") == 100 / (100.0 - 100 / 4.0)
    with pytest.raises(Overloaded):
        flow.ask(Band.INTERACTIVE, max_tokens=147)
    assert flow.controller.admission.wait_s(Band.STANDARD, "t") == 100 / (100.0 - 250 / 4.0)
    assert not waiting.has_place


@pytest.mark.parametrize(
    ("band", "asked", "reason", "code"),
    [
        (Band.STANDARD, {"within_s": 5.0}, "deadline", "slow_down"),
        (Band.STANDARD, {}, "max_predicted_wait", "server_overloaded"),
        (Band.INTERACTIVE, {"max_tokens": 30}, "max_num_queued_tokens", "server_overloaded"),
        (Band.INTERACTIVE, {"max_tokens": 5}, "max_num_queued_reqs", "server_overloaded"),
    ],
)
async def test_each_limit_refuses_under_its_own_name(band, asked, reason, code):
    max_requests = 2 if reason == "max_num_queued_reqs" else 3
    flow = Flow(stats(slots=1, rate=2.0), max_requests=max_requests, max_tokens=40, max_predicted_wait_s=10.0)
    await flow.ask_many(3, Band.INTERACTIVE)
    with pytest.raises(Overloaded) as refusal:
        flow.ask(band, **asked)
    assert (refusal.value.reason, refusal.value.code) == (reason, code)


async def test_an_idle_tenant_is_accepted_beside_a_flood_of_its_band():
    flow = Flow(stats(slots=4, rate=1000.0), max_predicted_wait_s=10.0)
    await flow.ask_many(70, tenant="flood", max_tokens=1500)
    with pytest.raises(Overloaded, match="start in about"):
        flow.ask(tenant="flood")
    assert flow.ask(tenant="idle")


async def test_a_tenant_below_its_fair_share_expects_no_wait():
    flow = Flow(stats(slots=4, rate=10.0), max_predicted_wait_s=5.0)
    for tenant in ("one", "two"):
        await flow.ask_many(4, tenant=tenant, max_tokens=10)
    waits = [flow.controller.admission.wait_s(Band.STANDARD, tenant) for tenant in ("idle", "one")]
    assert waits[0] == 0.0 and waits[1] is not None and waits[1] > 0


async def test_a_tenant_fills_no_more_than_its_share_of_a_queue():
    flow = Flow(stats(slots=1), max_requests=10, max_tokens=1000, max_tenant_share=0.5)
    await flow.ask_many(6, tenant="flood")
    with pytest.raises(Overloaded, match="5 standard requests of this tenant wait; its limit is 5") as refusal:
        flow.ask(tenant="flood")
    assert (refusal.value.reason, refusal.value.code) == ("max_tenant_queued_reqs", "rate_limit_exceeded")
    await flow.ask_one(tenant="idle", max_tokens=447)
    with pytest.raises(Overloaded, match=r"450 tokens .* need 103; its limit is 500") as refusal:
        flow.ask(tenant="idle", max_tokens=100)
    assert (refusal.value.reason, refusal.value.code) == ("max_tenant_queued_tokens", "rate_limit_exceeded")


async def test_headroom_is_what_the_tenant_itself_may_still_send():
    flow = Flow(stats(slots=1), max_requests=10, max_tokens=10**6, max_tenant_share=0.6)
    await flow.ask_many(7, tenant="flood")
    left = {t: flow.controller.admission.headroom(Band.STANDARD, t).num_requests_left for t in ("flood", "idle")}
    assert left == {"flood": 0, "idle": 4}


async def test_headroom_is_the_band_limit_less_waiting_requests():
    flow = Flow(max_requests=3, max_tokens=100)
    assert flow.controller.admission.headroom(Band.STANDARD, "t") == EMPTY
    flow.report(stats(slots=1, rate=2.0, running=(1, 0, 0)))
    await flow.ask_many(2)
    standard = flow.controller.admission.headroom(Band.STANDARD, "t")
    assert standard == replace(EMPTY, num_requests=2, num_tokens=22, wait_s=11.0)
    assert (standard.num_requests_left, standard.num_tokens_left, standard.reset_s) == (1, 78, 11.0)
    assert flow.controller.admission.headroom(Band.INTERACTIVE, "t") == replace(EMPTY, wait_s=0.0)


@pytest.mark.parametrize("max_tokens", [25, 10**6])
async def test_as_many_requests_as_are_left_are_accepted(max_tokens: int):
    flow = Flow(stats(slots=1), max_requests=7, max_tokens=max_tokens)
    await flow.ask_one()
    while (
        left := flow.controller.admission.headroom(Band.STANDARD, "t")
    ).num_requests_left and left.num_tokens_left >= 11:
        await flow.ask_one()
    with pytest.raises(Overloaded):
        flow.ask()


async def test_no_request_is_left_where_the_wait_would_be_too_long():
    flow = Flow(stats(slots=1, rate=10.0, running=(1, 0, 0)), max_requests=100, max_predicted_wait_s=5.0)
    for _ in range(20):
        with suppress(Overloaded):
            await flow.ask_one()
    headroom = flow.controller.admission.headroom(Band.STANDARD, "t")
    assert 0 < headroom.num_requests < 20
    assert (headroom.num_requests_left, headroom.num_tokens_left) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_requests": 5, "num_tokens": 170}, (0, 0, None)),  # requests that came back wait beyond the limits
        ({}, (3, 100, 0.0)),
        ({"wait_s": 7.0}, (3, 100, 0.0)),  # the waiting work is of bands above
        ({"wait_s": 7.0, "max_wait_s": 5.0}, (0, 0, 7.0)),
    ],
)
def test_headroom_has_the_room_left_and_the_reset_time(changes, expected):
    headroom = replace(EMPTY, **changes)
    assert (headroom.num_requests_left, headroom.num_tokens_left, headroom.reset_s) == expected


async def test_the_dispatcher_passes_the_headroom_on():
    world = World(FakeReplica("a"), limits=limits(max_requests=3))
    assert world.dispatcher.headroom(Band.BATCH, "t") == world.flow.admission.headroom(Band.BATCH, "t")


def learnt(*lengths: int, quantile: float = 0.7, **by_tenant: int) -> OutputLengths:
    """Return the predictor after these lengths of tenant `t`, and then one of each other tenant."""
    expected = OutputLengths(quantile)
    for tenant, length in [*(("t", length) for length in lengths), *by_tenant.items()]:
        expected.observe(tenant, Band.STANDARD, length)
    return expected


@pytest.mark.parametrize(
    ("lengths", "asked", "expected"),
    [
        (learnt(), {"max_tokens": 77}, 77),
        (learnt(*range(1, 11)), {}, 8),
        (learnt(*range(1, 11), quantile=0.5), {}, 6),
        (learnt(5), {}, 5),
        (learnt(500, 600, 700), {"max_tokens": 16}, 16),
        (learnt(10, 10, 10), {"tenant": "unknown"}, 10),
        (learnt(10, 10, 10), {"tenant": "unknown", "band": Band.BATCH}, 100),
        (learnt(brief=5, verbose=90), {"tenant": "brief"}, 5),
        (learnt(brief=5, verbose=90), {"tenant": "verbose"}, 90),
        (learnt(3, 3, 3), {"ignore_eos": True}, 100),
        (learnt(3, 3, 3), {"ignore_eos": True, "stop": ("x",)}, 3),
        (learnt(*[1000] * 500, *[10] * 64), {}, 10),
    ],
    ids=[
        "nothing is known", "quantile", "other quantile", "one length", "at most max_tokens", "unknown tenant",
        "unknown band", "tenant", "other tenant", "cannot stop", "can stop by a string", "window",
    ],
)  # fmt: skip
def test_expected_output_is_a_quantile_of_recent_requests(lengths, asked, expected):
    assert lengths.expect(request(**{"max_tokens": 100, **asked})) == expected


def test_the_number_of_tenants_with_known_lengths_is_bounded():
    expected = OutputLengths()
    for number in range(module._MAX_KEYS + 100):
        expected.observe(f"tenant-{number}", Band.STANDARD, 7 + (number == 0))
    assert len(expected._lengths) <= module._MAX_KEYS
    assert expected.expect(request(tenant="tenant-0", max_tokens=100)) == 7, "forgotten: the band's average again"
