"""Sequences and tokens of each step, preemption for slots and blocks, and refusals on arrival."""

from dataclasses import replace

import pytest

from replicas.engine.config import KVPressurePolicy
from replicas.errors import DeadlineExceeded, InvalidRequest, NoReplicaAvailable, Overloaded
from replicas.protocol import Band, FinishReason
from testkit.engine.shadow_runner import World, config, continuation, prompt, request


def test_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    world = World(config(max_num_batched_tokens=10, max_num_seqs=2))
    world.run(request(prompt=prompt(25), max_tokens=2))
    assert [batch.num_tokens for batch in world.runner.batches] == [10, 10, 5, 1]
    assert tuple(world.outcomes["r"].token_ids) == continuation(prompt(25), 2)


def test_decodes_keep_stepping_while_a_long_prompt_prefills() -> None:
    world = World(config(max_num_batched_tokens=8, max_num_seqs=4))
    world.add(*(request(f"decode{number}", prompt(2, number), max_tokens=40) for number in range(3)))
    world.step()
    world.add(request("long", prompt(100), max_tokens=1))
    while not world.outcomes["long"].token_ids:
        before = [len(world.outcomes[f"decode{number}"].token_ids) for number in range(3)]
        world.step()
        after = [len(world.outcomes[f"decode{number}"].token_ids) for number in range(3)]
        assert after == [count + 1 for count in before]


@pytest.mark.parametrize("num_long", [1, 3])
def test_short_prompt_behind_long_ones_starts_in_the_next_step(num_long: int) -> None:
    world = World(config(num_blocks=200, max_num_batched_tokens=16, max_num_seqs=8, max_num_partial_prefills=2))
    world.add(*(request(f"long{number}", prompt(120, number), max_tokens=1) for number in range(num_long)))
    world.step()
    world.add(request("short", prompt(6, 77), max_tokens=1))
    assert world.steps_until_first_token("short") == 1
    assert not world.outcomes["long0"].token_ids


@pytest.mark.parametrize(
    ("max_num_partial_prefills", "scheduled"), [(2, {"long0": 16}), (3, {"long0": 11, "long1": 5})]
)
def test_long_prefills_leave_a_place_and_share_all_tokens(
    max_num_partial_prefills: int, scheduled: dict[str, int]
) -> None:
    world = World(config(num_blocks=200, max_num_batched_tokens=16, max_num_partial_prefills=max_num_partial_prefills))
    world.add(*(request(f"long{number}", prompt(100, number), max_tokens=1) for number in range(3)))
    world.step()
    assert {item.sequence.request_id: item.num_tokens for item in world.runner.batches[0].items} == scheduled


def test_urgent_request_takes_a_slot_and_the_victim_resumes() -> None:
    world = World(config(max_num_seqs=2))
    world.add(*(request(f"batch{number}", prompt(8, number), max_tokens=20, band=Band.BATCH) for number in range(2)))
    world.step(3)
    world.add(request("urgent", prompt(5, 9), max_tokens=3, band=Band.INTERACTIVE))
    assert world.steps_until_first_token("urgent") == 1
    assert world.engine.stats().num_running_by_band == (1, 0, 1)
    assert world.engine.stats().num_waiting_by_band == (0, 0, 1)
    world.run()
    for number in range(2):
        assert tuple(world.outcomes[f"batch{number}"].token_ids) == continuation(prompt(8, number), 20)


def test_resuming_recomputes_less_than_one_block() -> None:
    world = World(config(max_num_seqs=1))
    world.add(request("batch", prompt(30), max_tokens=20, band=Band.BATCH))
    world.step(10)
    world.add(request("urgent", prompt(5, 9), max_tokens=1, band=Band.INTERACTIVE))
    world.step()
    num_before = len(world.runner.batches)
    world.step()
    (item,) = world.runner.batches[num_before].items
    assert item.sequence.request_id == "batch"
    assert item.num_tokens <= world.config.block_size


def test_urgent_request_takes_blocks_from_lower_bands_only() -> None:
    world = World(config(num_blocks=10, max_model_len=40, max_num_seqs=8))
    world.add(
        request("peer", prompt(12, 1), max_tokens=4, band=Band.INTERACTIVE),
        request("batch", prompt(20, 2), max_tokens=4, band=Band.BATCH),
    )
    world.step()
    world.add(request("urgent", prompt(20, 3), max_tokens=1, band=Band.INTERACTIVE))
    world.step()
    assert world.outcomes["urgent"].finish_reason is FinishReason.LENGTH
    assert len(world.outcomes["peer"].token_ids) == 2
    assert world.engine.stats().num_waiting_by_band == (0, 0, 1)
    world.run()


def test_suspect_runs_alone_and_the_others_resume_unchanged() -> None:
    world = World(config())
    world.add(*(request(f"r{number}", prompt(8, number), max_tokens=20) for number in range(3)))
    world.step(3)
    world.add(
        replace(request("suspect", prompt(6, 9), max_tokens=5, band=Band.INTERACTIVE), is_isolated=True),
        request("urgent", prompt(6, 19), max_tokens=5, band=Band.INTERACTIVE),
    )
    first = len(world.runner.batches)
    world.run()
    alone = [[item.sequence.request_id for item in batch.items] for batch in world.runner.batches[first : first + 5]]
    assert alone == [["suspect"]] * 5
    assert tuple(world.outcomes["urgent"].token_ids) == continuation(prompt(6, 19), 5)
    for number in range(3):
        assert tuple(world.outcomes[f"r{number}"].token_ids) == continuation(prompt(8, number), 20)


def test_order_in_a_band_is_deadline_then_arrival() -> None:
    world = World(config(max_num_seqs=1))
    now = world.clock.now
    world.run(
        request("running", max_tokens=1),
        request("none", max_tokens=1),
        request("late", max_tokens=1, deadline_unix_s=world.clock.unix(now + 90)),
        request("soon", max_tokens=1, deadline_unix_s=world.clock.unix(now + 60)),
    )
    order = [batch.items[0].sequence.request_id for batch in world.runner.batches]
    assert order == ["soon", "late", "running", "none"]


def test_starved_band_gets_one_sequence_in_and_keeps_its_slot() -> None:
    world = World(config(max_num_seqs=1, promote_after_s=10.0))
    world.add(
        *(request(f"batch{number}", prompt(4, number), max_tokens=6, band=Band.BATCH) for number in range(3)),
        *(
            request(f"urgent{number}", prompt(4, 20 + number), max_tokens=4, band=Band.INTERACTIVE)
            for number in range(30)
        ),
    )
    first_token_s: dict[str, float] = {}
    started_s = world.clock.now
    while world.engine.has_work:
        world.clock.now += 1.0
        world.step()
        for request_id, outcome in world.outcomes.items():
            if outcome.token_ids:
                first_token_s.setdefault(request_id, world.clock.now - started_s)
    batches = [batch.items[0].sequence.request_id for batch in world.runner.batches]
    assert 10 <= first_token_s["batch0"] <= 10 + 4 + 1, "one urgent request may have to finish first"
    first = batches.index("batch0")
    assert batches[first : first + 6] == ["batch0"] * 6, "a promoted sequence is not preempted for a slot"
    assert first_token_s["batch1"] - first_token_s["batch0"] >= 10, "the clock restarts after a promotion"


def test_promoted_request_runs_first_and_keeps_its_slot() -> None:
    world = World(config(max_num_seqs=1))
    world.add(request("running", prompt(4, 1), max_tokens=3, band=Band.INTERACTIVE))
    world.step()
    world.run(
        request("urgent", prompt(4, 2), max_tokens=3, band=Band.INTERACTIVE),
        replace(request("promoted", prompt(4, 3), max_tokens=3, band=Band.BATCH), is_promoted=True),
    )
    order = [batch.items[0].sequence.request_id for batch in world.runner.batches]
    assert order == ["running"] * 3 + ["promoted"] * 3 + ["urgent"] * 3


def test_promoted_request_without_a_slot_may_be_passed() -> None:
    world = World(config(max_num_seqs=2))
    world.add(
        request("urgent0", prompt(4, 1), max_tokens=60, band=Band.INTERACTIVE),
        request("usual", prompt(4, 2), max_tokens=60),
    )
    world.step()
    world.add(replace(request("promoted", prompt(4, 3), max_tokens=3, band=Band.BATCH), is_promoted=True))
    world.step()
    world.add(request("urgent1", prompt(4, 4), max_tokens=3, band=Band.INTERACTIVE))
    assert world.steps_until_first_token("urgent1") == 1
    world.run()


def test_long_decodes_count_as_service_and_promote_nothing() -> None:
    world = World(config(max_num_seqs=2, promote_after_s=5.0))
    world.add(*(request(f"batch{number}", prompt(4, number), max_tokens=80, band=Band.BATCH) for number in range(3)))
    for _ in range(20):
        world.clock.now += 1
        world.step()
    world.add(request("urgent", prompt(4, 9), max_tokens=2, band=Band.INTERACTIVE))
    assert world.steps_until_first_token("urgent") == 1
    assert world.engine._scheduler.num_promotions == 0
    world.run()


def test_blocks_that_lower_bands_share_are_not_counted_twice() -> None:
    world = World(config(num_blocks=50, max_model_len=160, max_num_seqs=8, max_num_batched_tokens=200))
    shared = prompt(80)
    world.add(
        request("peer", shared, max_tokens=60, band=Band.INTERACTIVE),
        *(request(f"batch{number}", (*shared, number), max_tokens=60, band=Band.BATCH) for number in range(4)),
    )
    world.step(3)
    world.add(request("big", prompt(130, 7), max_tokens=2, band=Band.INTERACTIVE))
    world.step(10)
    assert world.engine._scheduler.num_preemptions == 0, "preempting them all would not have made room"
    world.run()


def test_pause_new_never_preempts_for_blocks_where_preempt_does() -> None:
    num_preemptions = {}
    for policy in KVPressurePolicy:
        world = World(config(num_blocks=12, max_model_len=48, kv_pressure_policy=policy))
        world.run(*(request(f"r{number}", prompt(8, number), max_tokens=24) for number in range(4)))
        num_preemptions[policy] = world.engine._scheduler.num_preemptions
    assert num_preemptions[KVPressurePolicy.PAUSE_NEW] == 0
    assert num_preemptions[KVPressurePolicy.PREEMPT] > 0


def test_requests_with_one_prompt_compute_it_once() -> None:
    world = World(config(num_blocks=100, max_num_batched_tokens=64))
    world.run(*(request(f"sample{number}", prompt(33), max_tokens=2) for number in range(6)))
    assert sum(batch.num_tokens for batch in world.runner.batches) == 33 + 5 * 1 + 6
    assert world.outcomes["sample5"].last is not None
    assert world.outcomes["sample5"].last.usage.cached_tokens == 32


def test_abort_frees_blocks_before_the_next_step() -> None:
    world = World(config())
    world.add(request("gone", prompt(20)), request("waits", prompt(20, 9)))
    world.step()
    world.engine.abort("gone")
    world.engine.abort("never existed")
    assert world.engine.stats().num_running == 1
    world.run()
    assert not world.outcomes["gone"].finish_reason


def test_passed_deadline_ends_a_sequence_without_a_further_step() -> None:
    world = World(config(max_num_seqs=1))
    world.add(
        request("runs", max_tokens=50, deadline_unix_s=world.clock.unix(world.clock.now + 5)),
        request("waits", prompt(9), deadline_unix_s=world.clock.unix(world.clock.now + 6)),
    )
    world.step()
    world.clock.now += 6
    world.step()
    assert len(world.runner.batches) == 1
    for request_id in ("runs", "waits"):
        last = world.outcomes[request_id].last
        assert last is not None and isinstance(last.error, DeadlineExceeded)
    assert not world.engine.has_work


def test_queue_limits_refuse_requests_without_a_slot() -> None:
    world = World(config(max_num_seqs=2, max_queued_requests=3, max_queued_tokens=100))
    world.add(*(request(f"r{number}", max_tokens=10) for number in range(5)))
    with pytest.raises(Overloaded, match="the queue would hold 4 requests; its limit is 3") as refused:
        world.add(request("one too many"))
    assert 1 <= refused.value.retry_after_s <= 60 and refused.value.reason == "max_num_queued_reqs"
    world.run()
    world.add(request("a", max_tokens=60), request("b", max_tokens=60))
    world.step()
    world.add(request("c", max_tokens=60))
    with pytest.raises(Overloaded, match="the queue would hold 126 tokens; its limit is 100"):
        world.add(request("d", max_tokens=60))


def test_request_that_can_never_fit_is_refused_on_arrival() -> None:
    world = World(config(max_model_len=128))
    with pytest.raises(InvalidRequest, match=r"length is 128 tokens.*129 tokens \(100 in the prompt, 29 in") as e:
        world.add(request(prompt=prompt(100), max_tokens=29))
    assert e.value.code == "context_length_exceeded"


def test_draining_engine_finishes_and_takes_nothing_new() -> None:
    world = World(config())
    world.add(request("accepted"))
    world.engine.drain()
    with pytest.raises(NoReplicaAvailable, match="draining"):
        world.add(request("new"))
    world.run()
    assert world.outcomes["accepted"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens .8. must exceed max_num_seqs .8."),
        ({"max_model_len": 257}, "max_model_len .257. exceeds the KV cache of 64 blocks x 4 = 256 tokens"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills is 0"),
        ({"target_itl_ms": 0}, "target_itl_ms is 0; it must be above 0"),
    ],
)
def test_contradicting_limits_name_both_values(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_requests_with_different_salts_share_no_block() -> None:
    world, prompt = World(config()), tuple(range(1, 40))
    for number, salt in enumerate([None, "a", "b", "a"]):
        world.run(replace(request(f"r{number}", prompt), cache_salt=salt))
    lasts = [world.outcomes[f"r{number}"].last for number in range(4)]
    assert [last.usage.cached_tokens for last in lasts if last is not None] == [0, 0, 0, 36]


def test_a_report_tells_each_ingress_its_part() -> None:
    world = World(config(max_num_seqs=2))
    of_x = replace(request("x", prompt(8), max_tokens=20, band=Band.BATCH), ingress_id="x", is_promoted=True)
    of_y = [replace(request(f"y{number}", prompt(8, number), max_tokens=20), ingress_id="y") for number in range(3)]
    world.add(of_x, *of_y)
    world.step()
    load = world.engine.stats()
    assert (load.num_running_by_band, load.num_waiting_by_band) == ((1, 1, 0), (0, 2, 0))
    parts = {share.ingress_id: share for share in load.by_ingress}
    assert {name: part.num_by_band for name, part in parts.items()} == {"x": (1, 0, 0), "y": (0, 3, 0)}
    assert sum(part.outstanding_tokens for part in parts.values()) == load.outstanding_tokens
    world.engine.abort("x")
    assert [share.ingress_id for share in world.engine.stats().by_ingress] == ["y"]
