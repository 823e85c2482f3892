"""When requests are dispatched: late binding, urgency, limits, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from replicas.errors import DeadlineExceeded, NoReplicaAvailable, Overloaded
from replicas.protocol import Band
from router.flow_control import SampleGroup
from router.types import Outcome
from tests.unit.router.fakes import stats
from tests.unit.router.flows import Asked, Flow, limits, raised_by
from tests.unit.router.simulated_time import settle_down


async def test_nothing_is_dispatched_while_replicas_are_full():
    flow = Flow()
    flow.report(stats("a", slots=2), stats("b", slots=3))
    asked = await flow.ask_many(9)
    assert sum(a.has_place for a in asked) == 5
    assert flow.in_flight() == {"a": 2, "b": 3}
    assert len(flow.controller.queue) == 4
    flow.settle(asked[0])
    await settle_down()
    assert [a.has_place for a in asked[4:7]] == [True, True, False], "one ended, one went out"


async def test_a_late_urgent_request_overtakes():
    flow = Flow()
    flow.report(stats(slots=1))
    [first] = await flow.ask_many(1, Band.INTERACTIVE)
    waiting = [flow.ask(Band.BATCH), flow.ask(Band.STANDARD), flow.ask(Band.INTERACTIVE)]
    await settle_down()
    assert not any(a.has_place for a in waiting[1:])
    for finished in (first, waiting[2], waiting[1]):
        flow.settle(finished)
        await settle_down()
    assert [name.split("-")[0] for name in flow.order] == ["interactive", "batch", "interactive", "standard"]


async def test_slots_of_lower_bands_count_as_free():
    flow = Flow()
    flow.report(stats(running=(0, 1, 3), slots=4))
    urgent = await flow.ask_many(6, Band.INTERACTIVE)
    assert sum(a.has_place for a in urgent) == 4
    flow.report(stats(taken=1.0, running=(4, 0, 0), waiting=(0, 1, 3), slots=4))
    assert not any(a.has_place for a in await flow.ask_many(2, Band.STANDARD))


async def test_blocks_of_lower_bands_count_as_free():
    flow = Flow()
    flow.report(stats(running=(0, 0, 1), free_blocks=2, held=(0, 0, 998)))
    prompt = tuple(range(1, 41))
    [standard] = await flow.ask_many(1, prompt=prompt)
    assert standard.has_place
    flow.report(stats(taken=1.0, running=(0, 1, 0), free_blocks=2, held=(0, 998, 0)))
    [other] = await flow.ask_many(1, prompt=prompt)
    [urgent] = await flow.ask_many(1, Band.INTERACTIVE, prompt=prompt)
    assert not other.has_place and urgent.has_place


async def test_prompts_that_no_report_counts_yet_take_room():
    flow = Flow()
    flow.report(stats(slots=8, running=(1, 0, 0), free_blocks=25, held=(975, 0, 0)))
    asked = [flow.ask(prompt=(number, *range(39))) for number in range(4)]
    await settle_down()
    assert [a.has_place for a in asked] == [True, True, False, False], "100 tokens are free; a prompt has 40"


async def test_one_request_waits_in_a_replica_whose_slots_another_ingress_keeps_taking():
    flow = Flow()
    flow.report(stats("a", slots=4, running=(1, 3, 0)), stats("b", slots=4, running=(4, 0, 0), waiting=(0, 2, 0)))
    asked = await flow.ask_many(3)
    assert flow.in_flight() == {"a": 1, "b": 0}, "nothing of its band runs on b"
    flow.report(stats("a", taken=1.0, slots=4, running=(1, 3, 0), waiting=(0, 1, 0)))
    await settle_down()
    assert [a.has_place for a in asked] == [True, False, False]
    flow.settle(asked[0])
    await settle_down()
    assert [a.has_place for a in asked[1:]] == [True, False], "the next takes its place in line"


async def test_a_place_in_line_is_one_for_blocks_too():
    flow = Flow()
    flow.report(stats(slots=4, running=(0, 1, 0), free_blocks=2, held=(0, 998, 0)))
    asked = await flow.ask_many(2, prompt=tuple(range(1, 41)))
    assert [a.has_place for a in asked] == [True, False]


async def test_an_empty_replica_takes_anything():
    flow = Flow()
    flow.report(stats(free_blocks=1))
    [huge] = await flow.ask_many(1, prompt=tuple(range(5000)))
    assert huge.has_place


async def test_nothing_of_its_band_passes_a_request_that_finds_no_room():
    flow = Flow()
    flow.report(stats(running=(0, 0, 1), free_blocks=10))
    large = flow.ask(prompt=tuple(range(100)))
    small, urgent = flow.ask(tenant="other"), flow.ask(Band.INTERACTIVE)
    await settle_down()
    assert urgent.has_place and not large.has_place
    assert not small.has_place, "else the large one would wait for ever"
    flow.report(stats(taken=1.0, free_blocks=900))
    await settle_down()
    assert large.has_place and small.has_place


async def test_batch_work_is_given_a_little_beyond_the_slots():
    flow = Flow(limits(batch_lookahead=0.25))
    flow.report(stats(slots=8))
    assert sum(a.has_place for a in await flow.ask_many(20, Band.BATCH)) == 10
    assert sum(a.has_place for a in await flow.ask_many(20, Band.STANDARD)) == 8, "and delays nobody"


async def test_a_small_replica_looks_one_batch_request_ahead_and_a_draining_one_none():
    flow = Flow()
    flow.report(stats("a", slots=2), stats("leaving", slots=2, is_draining=True))
    assert sum(a.has_place for a in await flow.ask_many(5, Band.BATCH)) == 3
    assert flow.in_flight() == {"a": 3, "leaving": 0}


@pytest.mark.parametrize("band", Band)
async def test_a_full_band_refuses_and_says_when_to_come_back(band: Band):
    flow = Flow(limits(max_requests=3, max_tokens=100))
    flow.report(stats(slots=1, rate=2.0, waiting=(0, 0, 1)))
    await flow.ask_many(1, Band.INTERACTIVE)
    await asyncio.sleep(5.1)  # What came lately is forgotten.
    await flow.ask_many(3, band)
    with pytest.raises(Overloaded, match=f"3 {band.name.lower()} requests wait; the limit is 3") as refusal:
        flow.ask(band)
    assert refusal.value.retry_after_s == 3 * 11 / 2.0
    assert refusal.value.reason == "max_num_queued_reqs"
    assert flow.observer.waits[1:] == [(band, Outcome.REJECTED_CAPACITY, 0.0)]
    assert len(flow.controller.queue) == 3


async def test_a_full_band_refuses_by_tokens_too():
    flow = Flow(limits(max_tokens=100))
    [first] = await flow.ask_many(1, max_tokens=60)
    with pytest.raises(Overloaded, match=r"63 tokens of standard requests wait .* 53; the limit is 100"):
        flow.ask(max_tokens=50)
    first.task.cancel()
    await settle_down()
    assert flow.ask(max_tokens=50)


async def test_the_predicted_wait_is_what_waits_in_the_band_and_above_by_the_measured_rate():
    flow = Flow()
    assert flow.controller.wait_s(Band.BATCH) is None
    flow.report(stats("a", rate=10.0, waiting=(0, 0, 1)), stats("b", rate=30.0, waiting=(0, 0, 1)))
    await flow.ask_many(8, Band.INTERACTIVE)
    assert flow.controller.wait_s(Band.BATCH) == 0.0
    await flow.ask_many(2, Band.INTERACTIVE, max_tokens=17)
    await flow.ask_many(3, Band.STANDARD, max_tokens=37)
    await flow.ask_many(4, Band.BATCH, max_tokens=97)
    await asyncio.sleep(5.1)  # What came lately is forgotten.
    assert flow.controller.wait_s(Band.INTERACTIVE) == 1.0
    assert flow.controller.wait_s(Band.STANDARD) == 4.0
    assert flow.controller.wait_s(Band.BATCH) == 14.0


async def test_what_could_not_start_before_its_deadline_is_refused_at_once():
    flow = Flow()
    flow.report(stats(rate=10.0, running=(4, 0, 0), slots=4))
    await flow.ask_many(5, max_tokens=17)
    with pytest.raises(Overloaded, match=r"start in about 10.0 s and its deadline is in 9.0 s") as refusal:
        flow.ask(within_s=9.0)
    assert (refusal.value.code, refusal.value.retry_after_s) == ("slow_down", 10.0)
    assert flow.ask(within_s=11.0)
    assert flow.ask(Band.INTERACTIVE, within_s=0.5), "nothing waits before it"


async def test_expired_work_leaves_the_queue_before_it_is_dispatched():
    flow = Flow()
    flow.report(stats(slots=1))
    [running] = await flow.ask_many(1)
    late, patient = flow.ask(within_s=5.0), flow.ask()
    await asyncio.sleep(5.0)
    assert isinstance(await raised_by(late.task), DeadlineExceeded)
    assert len(flow.controller.queue) == 1
    flow.settle(running)
    await settle_down()
    assert patient.has_place
    assert flow.observer.waits[1:] == [
        (Band.STANDARD, Outcome.EVICTED_TTL, 5.0),
        (Band.STANDARD, Outcome.DISPATCHED, 5.0),
    ]
    flow.settle(patient)
    flow.check_idle()


async def test_room_at_the_very_moment_of_expiry_is_not_lost():
    """Whichever comes first, the slot is either used or free."""
    flow = Flow()
    flow.report(stats(slots=1))
    [running] = await flow.ask_many(1)
    late = flow.ask(within_s=5.0)
    await settle_down()
    asyncio.get_running_loop().call_at(flow.clock.now + 5.0, flow.settle, running)
    error = await raised_by(late.task)
    assert late.has_place == (error is None)
    [other] = await flow.ask_many(1)
    if late.has_place:
        flow.settle(late)
        await settle_down()
    assert other.has_place
    flow.settle(other)
    flow.check_idle()


async def test_nothing_waits_longer_than_the_longest_wait():
    flow = Flow(limits(max_queue_wait_s=20.0))
    flow.report(stats(slots=1))
    await flow.ask_many(1)
    other = flow.ask()
    started_s = flow.clock.now
    assert isinstance(await raised_by(other.task), DeadlineExceeded)
    assert flow.clock.now - started_s == pytest.approx(20.0)


async def test_without_a_replica_requests_are_held_and_go_out_when_one_appears():
    flow = Flow()
    asked = await flow.ask_many(3)
    await asyncio.sleep(120.0)
    assert not any(a.task.done() for a in asked)
    flow.report(stats("new", slots=2))
    await settle_down()
    assert [a.has_place for a in asked] == [True, True, False]


async def test_without_a_replica_the_longest_wait_ends_with_its_own_word():
    flow = Flow(limits(max_queue_wait_s=20.0))
    [asked] = await flow.ask_many(1)
    assert isinstance(await raised_by(asked.task), NoReplicaAvailable)
    assert flow.observer.waits == [(Band.STANDARD, Outcome.EVICTED_NO_ENDPOINTS, 20.0)]
    flow.check_idle()


async def test_cancelling_what_waits_takes_it_out_of_line():
    flow = Flow()
    flow.report(stats(slots=1))
    running, cancelled, other = await flow.ask_many(3)
    cancelled.task.cancel()
    await settle_down()
    assert len(flow.controller.queue) == 1
    assert flow.observer.outcomes()[Outcome.EVICTED_CONTEXT_CANCELLED] == 1
    flow.settle(running)
    await settle_down()
    assert other.has_place


@pytest.mark.parametrize("is_cancelled_first", [False, True])
async def test_cancelling_at_the_moment_of_dispatch_leaks_neither_place_nor_entry(is_cancelled_first: bool):
    flow = Flow()
    flow.report(stats(slots=1))
    running, cancelled, other = await flow.ask_many(3)
    if is_cancelled_first:
        cancelled.task.cancel()
        flow.settle(running)
    else:
        flow.settle(running)
        assert flow.in_flight() == {"a": 1}, "it is dispatched, and has not heard of it"
        cancelled.task.cancel()
    await settle_down()
    assert other.has_place and cancelled.task.cancelled()
    assert flow.in_flight() == {"a": 1}
    flow.settle(other)
    flow.check_idle()


async def test_one_more_of_each_band_waits_in_the_replica_for_the_next_slot():
    flow = Flow(limits(lookahead=1))
    flow.report(stats("a", slots=2), stats("leaving", slots=2, is_draining=True))
    standard = await flow.ask_many(4)
    assert [a.has_place for a in standard] == [True, True, True, False]
    urgent = await flow.ask_many(4, Band.INTERACTIVE)
    assert [a.has_place for a in urgent] == [True, True, True, False]
    for ended in urgent[:3]:
        flow.settle(ended)
    await settle_down()
    assert urgent[3].has_place and not standard[3].has_place


async def test_of_several_replicas_none_gets_what_would_wait_there_unless_for_a_less_urgent_one():
    flow = Flow(limits(lookahead=1))
    flow.report(stats("a", slots=2), stats("b", slots=2))
    standard = await flow.ask_many(5)
    assert [a.has_place for a in standard] == [True, True, True, True, False]
    urgent = await flow.ask_many(7, Band.INTERACTIVE)
    assert [a.has_place for a in urgent] == [True] * 6 + [False], "beside standard work one more waits in each"
    ended = next(a for a in standard if a.has_place)
    flow.settle(ended)
    await settle_down()
    assert not standard[4].has_place, "its slot is an interactive request's"


async def test_a_starved_band_takes_the_place_in_line_before_more_urgent_work():
    flow = Flow(limits(promote_after_s=30.0, lookahead=1))
    flow.report(stats(slots=1))
    running, ahead, _ = await flow.ask_many(3, Band.INTERACTIVE)
    [starved] = await flow.ask_many(1, Band.BATCH)
    await asyncio.sleep(30.0)
    flow.controller.notify()
    await settle_down()
    assert ahead.has_place and not starved.has_place
    flow.settle(running)
    await settle_down()
    assert starved.has_place and starved.task.result().is_promoted


async def test_a_starved_band_is_served_once_and_heard_of():
    flow = Flow(limits(promote_after_s=30.0))
    flow.report(stats(slots=1))
    asked = await flow.ask_many(1, Band.INTERACTIVE) + await flow.ask_many(50, Band.STANDARD)
    for _ in range(95):
        await asyncio.sleep(1.0)
        asked.append(flow.ask(Band.INTERACTIVE))
        await settle_down()
        for running in [a for a in asked if a.has_place]:
            asked.remove(running)
            flow.settle(running)
        await settle_down()
    turns = [index for index, name in enumerate(flow.order) if name.startswith("standard")]
    assert [turns[0], turns[1] - turns[0], turns[2] - turns[1]] == [pytest.approx(30, abs=1)] * 3
    assert flow.observer.promotions == [Band.STANDARD] * 3


async def test_a_starved_band_needs_a_slot_and_not_free_blocks():
    flow = Flow(limits(promote_after_s=30.0))
    flow.report(stats(running=(1, 0, 0), free_blocks=2, held=(998, 0, 0)))
    [big] = await flow.ask_many(1, Band.STANDARD, prompt=tuple(range(1, 65)))
    assert not big.has_place
    await asyncio.sleep(30.0)
    flow.report(stats(running=(1, 0, 0), free_blocks=2, held=(998, 0, 0)))
    await settle_down()
    assert big.has_place and big.task.result().is_promoted
    assert flow.table.views()[0].num_by_band == (2, 0, 0), "nobody may count its slot as free"


async def test_a_starved_band_passes_its_own_paused_requests_one_at_a_time():
    flow = Flow(limits(promote_after_s=30.0))
    held = stats(slots=2, running=(1, 1, 0), waiting=(0, 0, 5))
    flow.report(held)
    [first, second] = await flow.ask_many(2, Band.BATCH)
    await asyncio.sleep(29.0)
    assert not first.has_place
    await asyncio.sleep(1.0)
    flow.report(replace(held, taken_unix_s=30.0))
    await settle_down()
    assert first.has_place and first.task.result().is_promoted and not second.has_place
    await asyncio.sleep(30.0)
    flow.report(replace(held, taken_unix_s=60.0))
    await settle_down()
    assert not second.has_place, "the first still waits for the slot that it was promised"
    flow.controller.progressed(first.task.result(), first.request, 1)
    flow.controller.notify()
    await settle_down()
    assert not second.has_place, "the band has been served"
    await asyncio.sleep(30.0)
    flow.report(replace(held, taken_unix_s=90.0))
    await settle_down()
    assert second.has_place and flow.observer.promotions == [Band.BATCH] * 2


async def test_a_dispatch_that_gives_no_token_does_not_count_as_service():
    """It went to the place beyond the slots, or its slot was taken from it before its prompt was computed."""
    flow = Flow(limits(promote_after_s=30.0))
    flow.report(stats(slots=2, running=(0, 2, 0)))
    [ahead] = await flow.ask_many(1, Band.BATCH)
    await asyncio.sleep(20.0)
    assert ahead.has_place and not ahead.task.result().is_promoted
    [waiting] = await flow.ask_many(1, Band.BATCH)
    await asyncio.sleep(29.0)
    flow.report(stats(taken=49.0, slots=2, running=(0, 2, 0), waiting=(0, 0, 1)))
    await settle_down()
    assert not waiting.has_place
    await asyncio.sleep(1.0)
    flow.report(stats(taken=50.0, slots=2, running=(0, 2, 0), waiting=(0, 0, 1)))
    await settle_down()
    assert waiting.has_place and waiting.task.result().is_promoted


async def test_what_is_predicted_to_wait_longer_than_its_band_may_is_refused():
    flow = Flow(limits(max_predicted_wait_s=20.0))
    flow.report(stats(slots=1, rate=10.0, running=(1, 0, 0)))
    await flow.ask_many(4, Band.STANDARD, max_tokens=47)
    await flow.ask_many(1, Band.STANDARD, max_tokens=7)
    with pytest.raises(Overloaded, match=r"start in about 21\.0 s; the limit for standard is 20 s") as refusal:
        flow.ask(Band.STANDARD)
    assert refusal.value.reason == "max_predicted_wait" and refusal.value.retry_after_s == 21.0
    assert flow.ask(Band.INTERACTIVE)


async def test_urgent_work_that_keeps_coming_counts_in_the_predicted_wait():
    flow = Flow()
    flow.report(stats(slots=2, rate=40.0, running=(1, 0, 0)))
    await flow.ask_many(1, Band.INTERACTIVE, max_tokens=97)
    await flow.ask_many(2, Band.STANDARD, max_tokens=47)
    assert flow.controller.wait_s(Band.INTERACTIVE) == 0.0
    assert flow.controller.wait_s(Band.STANDARD) == 100 / (40.0 - 100 / 4.0)
    await asyncio.sleep(5.1)
    assert flow.controller.wait_s(Band.STANDARD) == 100 / 40.0
    for _ in range(9):
        flow.ask(Band.INTERACTIVE, max_tokens=97)
    await settle_down()
    assert flow.controller.wait_s(Band.STANDARD) == pytest.approx(1000 / (0.02 * 40.0)), "some is always left"


async def test_nobody_is_sent_away_for_longer_than_is_known_ahead():
    flow = Flow(limits(max_predicted_wait_s=20.0))
    flow.report(stats(slots=1, rate=40.0, running=(1, 0, 0)))
    await flow.ask_many(1, Band.STANDARD, max_tokens=77)
    for _ in range(9):
        flow.ask(Band.INTERACTIVE, max_tokens=17)
    await settle_down()
    with pytest.raises(Overloaded, match="start in about 300") as refusal:
        flow.ask(Band.STANDARD)
    assert refusal.value.retry_after_s == (80 + 8 * 20) / 40.0 + 4.0  # one of the nine waits in the replica


async def test_urgent_work_that_is_refused_counts_in_the_predicted_wait_of_less_urgent_work():
    flow = Flow(limits(max_requests=1))
    flow.report(stats(slots=1, rate=100.0))
    await flow.ask_many(2, Band.INTERACTIVE, max_tokens=47)
    waiting = flow.ask(Band.STANDARD, max_tokens=47)
    await settle_down()
    assert flow.controller.wait_s(Band.STANDARD) == 100 / (100.0 - 100 / 4.0)
    with pytest.raises(Overloaded):
        flow.ask(Band.INTERACTIVE, max_tokens=147)
    assert flow.controller.wait_s(Band.STANDARD) == 100 / (100.0 - 250 / 4.0)
    assert not waiting.has_place


async def test_a_request_that_comes_back_stands_where_it_stood():
    flow = Flow()
    flow.report(stats(slots=1))
    first, second, third = await flow.ask_many(3)
    flow.refuse(first)
    again = flow.ask_again(first)
    await settle_down()
    flow.report(stats(taken=1.0, slots=1))
    for dispatched in (again, second, third):
        await settle_down()
        assert dispatched.has_place
        flow.settle(dispatched)
    flow.check_idle()


async def test_a_group_stays_together_while_there_is_room():
    flow = Flow()
    flow.report(stats("a", slots=4), stats("b", slots=4))
    group = SampleGroup()
    asked = [flow.ask(group=group, seed=number) for number in range(6)]
    await settle_down()
    counts = Counter(a.replica_id for a in asked)
    assert sorted(counts.values()) == [2, 4]
    assert len({a.replica_id for a in asked[:4]}) == 1


async def test_a_free_slot_comes_before_a_group_and_before_a_place_in_line():
    flow = Flow()
    flow.report(stats("a", slots=4), stats("b", slots=4))
    group = SampleGroup()
    asked = [flow.ask(Band.BATCH, group=group, seed=number) for number in range(8)]
    await settle_down()
    assert all(a.has_place for a in asked)
    assert flow.in_flight() == {"a": 4, "b": 4}, "one more could wait on each"


async def test_what_outputs_come_to_is_learnt():
    flow = Flow()
    flow.report()
    [asked] = await flow.ask_many(1, max_tokens=1000)
    assert asked.task.result().expected_output_tokens == 1000
    flow.controller.observe(asked.request, 12)
    [asked] = await flow.ask_many(1, max_tokens=1000)
    assert (asked.task.result().expected_output_tokens, asked.task.result().expected_tokens) == (12, 15)


async def test_tenants_are_charged_what_requests_really_cost():
    """Both are expected to need 103 tokens; those of `short` end after 20, so it is given five times as many."""
    flow = Flow()
    flow.report(stats(slots=1))
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


@pytest.mark.parametrize("seed", range(60))
async def test_random_operations_leak_nothing(seed: int):
    rng = random.Random(seed)
    flow = Flow(limits(max_requests=12, max_tokens=600, promote_after_s=4.0, max_queue_wait_s=30.0))
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
    for placed in [a for a in asked if a.has_place]:
        flow.settle(placed)
    await settle_down()
    flow.check_idle()
