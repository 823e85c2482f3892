"""The moment of dispatch: late binding, urgency, deadlines, cancellation; and its reason."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest

from replicas.errors import DeadlineExceeded, NoReplicaAvailable, Overloaded
from replicas.protocol import Band
from router.flow.flow_control import SampleGroup
from router.types import Outcome, Reason
from testkit.router.flow_worlds import Asked, Flow
from testkit.router.simulated_replicas import stats
from testkit.router.simulated_time import settle_down


@pytest.fixture
async def flow() -> Flow:
    """Return a flow controller over one replica with one slot."""
    return Flow(stats(slots=1))


async def test_nothing_is_dispatched_while_replicas_are_full():
    flow = Flow(stats("a", slots=2), stats("b", slots=3))
    asked = await flow.ask_many(9)
    assert sum(a.has_place for a in asked) == 5
    assert flow.in_flight() == {"a": 2, "b": 3}
    assert len(flow.controller.queue) == 4
    await flow.end(asked[0])
    assert [a.has_place for a in asked[4:7]] == [True, True, False], "one ended, one went out"


async def test_a_late_urgent_request_overtakes(flow: Flow):
    first = await flow.ask_one(Band.INTERACTIVE)
    waiting = [flow.ask(Band.BATCH), flow.ask(Band.STANDARD), flow.ask(Band.INTERACTIVE)]
    await settle_down()
    assert not any(a.has_place for a in waiting[1:])
    await flow.end(first, waiting[2], waiting[1])
    assert [name.split("-")[0] for name in flow.order] == ["interactive", "batch", "interactive", "standard"]


async def test_slots_of_lower_bands_count_as_free():
    flow = Flow(stats(running=(0, 1, 3), slots=4))
    assert sum(a.has_place for a in await flow.ask_many(6, Band.INTERACTIVE)) == 4
    flow.report(stats(taken=1.0, running=(4, 0, 0), waiting=(0, 1, 3), slots=4))
    assert not any(a.has_place for a in await flow.ask_many(2, Band.STANDARD))


async def test_blocks_of_lower_bands_count_as_free():
    flow, prompt = Flow(stats(running=(0, 0, 1), free_blocks=2, held=(0, 0, 998))), tuple(range(1, 41))
    assert (await flow.ask_one(prompt=prompt)).has_place
    flow.report(stats(taken=1.0, running=(0, 1, 0), free_blocks=2, held=(0, 998, 0)))
    assert not (await flow.ask_one(prompt=prompt)).has_place
    assert (await flow.ask_one(Band.INTERACTIVE, prompt=prompt)).has_place


async def test_prompts_that_no_report_counts_yet_take_room():
    flow = Flow(stats(slots=8, running=(1, 0, 0), free_blocks=25, held=(975, 0, 0)))
    asked = [flow.ask(prompt=(number, *range(39))) for number in range(4)]
    await settle_down()
    assert [a.has_place for a in asked] == [True, True, False, False], "100 tokens are free; a prompt has 40"


async def test_one_request_waits_where_another_ingress_takes_the_slots():
    flow = Flow(stats("a", slots=4, running=(1, 3, 0)), stats("b", slots=4, running=(4, 0, 0), waiting=(0, 2, 0)))
    asked = await flow.ask_many(3)
    assert flow.in_flight() == {"a": 1, "b": 0}, "nothing of its band runs on b"
    await flow.learn(stats("a", taken=1.0, slots=4, running=(1, 3, 0), waiting=(0, 1, 0)))
    assert [a.has_place for a in asked] == [True, False, False]
    await flow.end(asked[0])
    assert [a.has_place for a in asked[1:]] == [True, False], "the next takes its place in line"


async def test_a_place_in_line_is_one_for_blocks_too():
    flow = Flow(stats(slots=4, running=(0, 1, 0), free_blocks=2, held=(0, 998, 0)))
    asked = await flow.ask_many(2, prompt=tuple(range(1, 41)))
    assert [a.has_place for a in asked] == [True, False]


async def test_a_tenant_below_its_share_is_dispatched_to_full_slots():
    flow = Flow(stats("a", slots=4), stats("b", slots=4))
    flooded = await flow.ask_many(20, tenant="flood")
    idle = await flow.ask_many(6, tenant="idle")
    assert [a.has_place for a in idle] == [True] * 4 + [False] * 2, "two of four slots on each replica"
    assert sum(a.has_place for a in flooded) == 8
    await flow.end(*idle[:4])
    assert [a.has_place for a in idle[4:]] == [True] * 2
    assert sum(a.has_place for a in flooded) == 8


async def test_many_tenants_are_given_no_more_slots_than_there_are():
    flow = Flow(stats(slots=4))
    await flow.ask_many(9, tenant="flood")
    others = [await flow.ask_one(tenant=f"tenant-{number}") for number in range(20)]
    assert sum(a.has_place for a in others) == 3


async def test_blocks_of_slots_that_are_given_up_count_as_free():
    flow = Flow(stats(slots=4))
    await flow.ask_many(4, tenant="flood")
    flow.report(stats(taken=1.0, slots=4, running=(0, 4, 0), own=(0, 4, 0), free_blocks=0, held=(0, 80, 0)))
    large = await flow.ask_one(tenant="idle", prompt=tuple(range(40 * 4 + 1)))
    small = await flow.ask_one(tenant="other", prompt=tuple(range(20 * 4)))
    assert (large.has_place, small.has_place) == (False, True)


async def test_a_new_tenant_gets_one_place_beside_other_ingresses():
    flow = Flow(stats(slots=4, running=(0, 3, 0)))
    await flow.ask_many(1, tenant="flood")
    flow.report(stats(taken=1.0, slots=4, running=(0, 4, 0), own=(0, 1, 0)))
    asked = await flow.ask_many(2, tenant="idle") + await flow.ask_many(1, tenant="other")
    assert [a.has_place for a in asked] == [True, False, False]


async def test_an_empty_replica_takes_anything():
    assert (await Flow(stats(free_blocks=1)).ask_one(prompt=tuple(range(5000)))).has_place


async def test_nothing_of_its_band_passes_a_request_that_finds_no_room():
    flow = Flow(stats(running=(0, 0, 1), free_blocks=10))
    large, small, urgent = flow.ask(prompt=tuple(range(100))), flow.ask(tenant="other"), flow.ask(Band.INTERACTIVE)
    await settle_down()
    assert urgent.has_place and not large.has_place
    assert not small.has_place, "else the large one would wait for ever"
    await flow.learn(stats(taken=1.0, free_blocks=900))
    assert large.has_place and small.has_place


async def test_batch_work_is_given_a_little_beyond_the_slots():
    flow = Flow(stats(slots=8), batch_lookahead=0.25)
    assert sum(a.has_place for a in await flow.ask_many(20, Band.BATCH)) == 10
    assert sum(a.has_place for a in await flow.ask_many(20, Band.STANDARD)) == 8, "and delays nobody"


async def test_batch_lookahead_is_1_if_small_and_0_if_draining():
    flow = Flow(stats("a", slots=2), stats("leaving", slots=2, is_draining=True))
    assert sum(a.has_place for a in await flow.ask_many(5, Band.BATCH)) == 3
    assert flow.in_flight() == {"a": 3, "leaving": 0}


async def test_expired_work_leaves_the_queue_before_it_is_dispatched(flow: Flow):
    running = await flow.ask_one()
    late, patient = flow.ask(within_s=5.0), flow.ask()
    with pytest.raises(DeadlineExceeded):
        await late.task
    assert len(flow.controller.queue) == 1
    await flow.end(running)
    assert flow.observer.waits[1:] == [
        (Band.STANDARD, Outcome.EVICTED_TTL, 5.0),
        (Band.STANDARD, Outcome.DISPATCHED, 5.0),
    ]
    flow.settle(patient)
    flow.check_idle()


async def test_room_at_the_very_moment_of_expiry_is_not_lost(flow: Flow):
    """Whichever comes first, the slot is either used or free."""
    running, late = await flow.ask_one(), flow.ask(within_s=5.0)
    await settle_down()
    asyncio.get_running_loop().call_at(flow.clock.now + 5.0, flow.settle, running)
    [error] = await asyncio.gather(late.task, return_exceptions=True)
    assert late.has_place != isinstance(error, DeadlineExceeded)
    other = await flow.ask_one()
    if late.has_place:
        await flow.end(late)
    assert other.has_place
    flow.settle(other)
    flow.check_idle()


async def test_nothing_waits_longer_than_the_longest_wait():
    flow = Flow(stats(slots=1), max_queue_wait_s=20.0)
    _, other = await flow.ask_one(), flow.ask()
    started_s = flow.clock.now
    with pytest.raises(DeadlineExceeded):
        await other.task
    assert flow.clock.now - started_s == pytest.approx(20.0)


async def test_without_a_replica_requests_are_held_until_one_appears():
    flow = Flow()
    asked = await flow.ask_many(3)
    await asyncio.sleep(120.0)
    assert not any(a.task.done() for a in asked)
    await flow.learn(stats("new", slots=2))
    assert [a.has_place for a in asked] == [True, True, False]


async def test_the_longest_wait_without_a_replica_has_an_error():
    flow = Flow(max_queue_wait_s=20.0)
    with pytest.raises(NoReplicaAvailable):
        await flow.ask().task
    assert flow.observer.waits == [(Band.STANDARD, Outcome.EVICTED_NO_ENDPOINTS, 20.0)]
    flow.check_idle()


async def test_cancelling_a_waiting_request_takes_it_out_of_line(flow: Flow):
    running, cancelled, other = await flow.ask_many(3)
    cancelled.task.cancel()
    await settle_down()
    assert len(flow.controller.queue) == 1
    assert flow.observer.outcomes()[Outcome.EVICTED_CONTEXT_CANCELLED] == 1
    await flow.end(running)
    assert other.has_place


@pytest.mark.parametrize("is_cancelled_first", [False, True])
async def test_cancelling_at_the_moment_of_dispatch_leaks_nothing(flow: Flow, is_cancelled_first: bool):
    running, cancelled, other = await flow.ask_many(3)
    if is_cancelled_first:
        cancelled.task.cancel()
    flow.settle(running)
    if not is_cancelled_first:
        assert flow.in_flight() == {"a": 1}, "it is dispatched, and has not heard of it"
        cancelled.task.cancel()
    await settle_down()
    assert other.has_place and cancelled.task.cancelled()
    assert flow.in_flight() == {"a": 1}
    flow.settle(other)
    flow.check_idle()


async def test_lookahead_is_one_request_of_each_band():
    flow = Flow(stats("a", slots=2), stats("leaving", slots=2, is_draining=True), lookahead=1)
    standard = await flow.ask_many(4)
    urgent = await flow.ask_many(4, Band.INTERACTIVE)
    for asked in (standard, urgent):
        assert [a.has_place for a in asked] == [True, True, True, False]
    await flow.end(*urgent[:3])
    assert urgent[3].has_place and not standard[3].has_place


async def test_several_replicas_look_ahead_beside_less_urgent_work():
    flow = Flow(stats("a", slots=2), stats("b", slots=2), lookahead=1)
    standard = await flow.ask_many(5)
    assert [a.has_place for a in standard] == [True, True, True, True, False]
    urgent = await flow.ask_many(7, Band.INTERACTIVE)
    assert [a.has_place for a in urgent] == [True] * 6 + [False], "beside standard work one more waits in each"
    await flow.end(standard[0])
    assert not standard[4].has_place, "its slot is an interactive request's"


async def test_a_starved_band_looks_ahead_before_urgent_work():
    flow = Flow(stats(slots=1), promote_after_s=30.0, lookahead=1)
    running, ahead, _ = await flow.ask_many(3, Band.INTERACTIVE)
    starved = await flow.ask_one(Band.BATCH)
    await asyncio.sleep(30.0)
    await flow.learn()
    assert ahead.has_place and not starved.has_place
    await flow.end(running)
    assert starved.is_promoted


async def test_a_starved_band_is_served_once_and_observed():
    flow = Flow(stats(slots=1), promote_after_s=30.0)
    asked = await flow.ask_many(1, Band.INTERACTIVE) + await flow.ask_many(50, Band.STANDARD)
    for _ in range(95):
        await asyncio.sleep(1.0)
        asked += await flow.ask_many(1, Band.INTERACTIVE)
        for running in [a for a in asked if a.has_place]:
            asked.remove(running)
            flow.settle(running)
        await settle_down()
    turns = [index for index, name in enumerate(flow.order) if name.startswith("standard")]
    assert [turns[0], turns[1] - turns[0], turns[2] - turns[1]] == [pytest.approx(30, abs=1)] * 3
    assert flow.observer.promotions == [Band.STANDARD] * 3


async def test_a_starved_band_needs_a_slot_and_not_free_blocks():
    full = stats(running=(1, 0, 0), free_blocks=2, held=(998, 0, 0))
    flow = Flow(full, promote_after_s=30.0)
    big = await flow.ask_one(Band.STANDARD, prompt=tuple(range(1, 65)))
    assert not big.has_place
    await asyncio.sleep(30.0)
    await flow.learn(full)
    assert big.is_promoted
    assert flow.table.views()[0].num_by_band == (2, 0, 0), "nobody may count its slot as free"


async def test_a_starved_band_passes_its_paused_requests_singly():
    flow = Flow(stats(slots=2, running=(1, 1, 0), waiting=(0, 0, 5)), promote_after_s=30.0)

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        own = flow.own_by_band("a")
        await flow.learn(stats(taken=flow.clock.now, slots=2, running=(1, 1, 0), waiting=(0, 0, 5), own=own))

    first, second = await flow.ask_many(2, Band.BATCH)
    await wait(29.0)
    assert not first.has_place
    await wait(1.0)
    assert first.is_promoted and not second.has_place
    await wait(30.0)
    assert not second.has_place, "the first still waits for the slot that it was promised"
    flow.controller.account.progressed(first.task.result(), first.request, 1)
    await flow.learn()
    assert not second.has_place, "the band has been served"
    await wait(30.0)
    assert second.has_place and flow.observer.promotions == [Band.BATCH] * 2


async def test_a_dispatch_without_a_token_is_not_service():
    """It went to the place beyond the slots, or its slot was taken from it before its prompt was computed."""
    flow = Flow(stats(slots=2, running=(0, 2, 0)), promote_after_s=30.0)
    ahead = await flow.ask_one(Band.BATCH)
    await asyncio.sleep(20.0)
    assert ahead.has_place and not ahead.is_promoted
    waiting = await flow.ask_one(Band.BATCH)
    for sleep_s, is_promoted in ((29.0, False), (1.0, True)):
        await asyncio.sleep(sleep_s)
        await flow.learn(stats(taken=flow.clock.now, slots=2, running=(0, 2, 0), waiting=(0, 0, 1)))
        assert (waiting.has_place, waiting.is_promoted) == (is_promoted, is_promoted)


async def test_a_request_that_comes_back_keeps_its_place_in_line(flow: Flow):
    first, second, third = await flow.ask_many(3)
    flow.refuse(first)
    again = flow.ask_again(first)
    await settle_down()
    await flow.learn(stats(taken=1.0, slots=1))
    await flow.end(again, second, third)
    flow.check_idle()


async def test_a_group_stays_together_while_there_is_room():
    flow, group = Flow(stats("a", slots=4), stats("b", slots=4)), SampleGroup()
    asked = [flow.ask(group=group, seed=number) for number in range(6)]
    await settle_down()
    assert sorted(Counter(a.replica_id for a in asked).values()) == [2, 4]
    assert len({a.replica_id for a in asked[:4]}) == 1


async def test_a_free_slot_is_preferred_to_group_and_lookahead():
    flow, group = Flow(stats("a", slots=4), stats("b", slots=4)), SampleGroup()
    asked = [flow.ask(Band.BATCH, group=group, seed=number) for number in range(8)]
    await settle_down()
    assert all(a.has_place for a in asked)
    assert flow.in_flight() == {"a": 4, "b": 4}, "one more could wait on each"


async def test_every_dispatch_is_observed_with_its_reason():
    flow, group = Flow(stats("a"), stats("b")), SampleGroup()
    asked = [flow.ask(group=group, prompt=tuple(range(1, 41)), seed=number) for number in range(3)]
    await settle_down()
    assert flow.observer.decisions == [Reason.AFFINITY, Reason.SAME_PROMPT, Reason.SAME_PROMPT]
    await flow.end(*asked)
    await flow.ask_one(prompt=(*range(1, 41), 50, 51))
    assert flow.observer.decisions[3:] == [Reason.PREFIX_HIT]


async def test_a_waiting_request_has_no_decision(flow: Flow):
    await flow.ask_many(3)
    assert flow.observer.decisions == [Reason.SINGLE_CANDIDATE]


async def test_expected_output_follows_the_observed_lengths():
    flow = Flow(stats())
    before = await flow.ask_one(max_tokens=1000)
    flow.controller.lengths.observe(before.request.tenant, before.request.band, 12)
    placed = [before.task.result(), (await flow.ask_one(max_tokens=1000)).task.result()]
    assert [(place.expected_output_tokens, place.expected_tokens) for place in placed] == [(1000, 1003), (12, 15)]


async def test_tenants_are_charged_the_real_cost_of_requests(flow: Flow):
    """Both are expected to need 103 tokens; those of `short` end after 20, so it is given five times as many."""
    asked = [flow.ask(tenant=tenant, max_tokens=100) for tenant in ("short", "long") for _ in range(200)]
    waiting = {a.request.request_id: a for a in asked}
    served: Counter[str] = Counter()
    for _ in range(180):
        await settle_down(5)
        current = waiting[flow.order[-1]]
        num_output_tokens = 17 if current.request.tenant == "short" else 97
        served[current.request.tenant] += 3 + num_output_tokens
        flow.settle(current, num_output_tokens)
    assert 0.9 <= served["short"] / served["long"] <= 1.1


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(60))
async def test_random_operations_leak_nothing(seed: int):
    rng = random.Random(seed)
    flow = Flow(max_requests=12, max_tokens=600, promote_after_s=4.0, max_queue_wait_s=30.0)
    asked: list[Asked] = []

    async def random_operation() -> None:
        placed = [a for a in asked if a.has_place]
        match rng.randrange(9):
            case 0 | 1 | 2:
                within_s = rng.choice([None, rng.random() * 10])
                prompt = tuple(range(rng.randrange(1, 60)))
                with suppress(Overloaded):
                    asked.append(
                        flow.ask(rng.choice(list(Band)), within_s=within_s, tenant=rng.choice("xyz"), prompt=prompt)
                    )
            case 3 if asked:
                rng.choice(asked).task.cancel()
            case 4 if placed:
                done = rng.choice(placed)
                asked.remove(done)
                flow.settle(done, rng.randrange(9))
            case 5 if placed:
                refused = rng.choice(placed)
                asked.remove(refused)
                flow.refuse(refused)
                asked.append(flow.ask_again(refused))
            case 6:
                flow.controller.forget(rng.choice("ab"))
            case 7:
                by_band = [rng.randrange(2) for _ in Band]
                is_draining = rng.random() < 0.2
                free_blocks = rng.choice([3, 30, 1000])
                flow.report(
                    stats(
                        rng.choice("ab"), taken=flow.clock.now, running=by_band, slots=rng.randrange(1, 5),
                        free_blocks=free_blocks, is_draining=is_draining, rate=rng.choice([0.0, 100.0]),
                    )
                )  # fmt: skip
            case 8:
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.5, 3.0]))
        if rng.random() < 0.7:
            await settle_down(rng.randrange(1, 4))
        flow.table.check_invariants()

    for _ in range(250):
        await random_operation()
    for leaving in asked:
        leaving.task.cancel()
    await settle_down()
    await flow.end(*(a for a in asked if a.has_place))
    flow.check_idle()
