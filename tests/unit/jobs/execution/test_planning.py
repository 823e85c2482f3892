"""Plans of the lines to run next, and predictions of late batches."""

import math
from collections import Counter
from typing import Any

import pytest

from replicas.protocol import Band
from router.flow.flow_queue import BandLimits, FlowQueue
from router.types import ReplicaView
from serve_app.jobs.execution.planning import LineCapacity, plan, raised_band
from serve_app.jobs.execution.throughput import BacklogView, ThroughputEstimator
from serve_app.jobs.storage.lines import LeasedLine
from serve_app.jobs.storage.ownership import Speed
from serve_app.jobs.storage.rows.batch_queue import Backlog, OpenBatch
from testkit.jobs.database_worlds import SetTime, success
from testkit.router.simulated_replicas import stats as replica_stats

NOW = 1_000_000.0
NEVER = -math.inf


def open_batch(name: str, num_queued: int = 100, tenant: str = "acme", **fields: Any) -> OpenBatch:
    given: dict[str, Any] = {"band": Band.BATCH, "band_ceiling": Band.INTERACTIVE, "expires_unix_s": None}
    return OpenBatch(
        id=name, tenant=tenant, endpoint="/v1/completions", num_queued=num_queued, **{**given, **fields}
    )  # fmt: skip


def leased(expected_tokens: int, batch_id: str = "b", position: int = 0) -> LeasedLine:
    return LeasedLine("acme", batch_id, position, 1, "{}", expected_tokens)


def planned(batches: list[OpenBatch], room: dict[Band, int] | int, **running: int) -> dict[str, int]:
    rooms = dict.fromkeys(Band, room) if isinstance(room, int) else room
    tokens = {(tenant, Band.BATCH): number for tenant, number in running.items()}
    return {want.batch.id: want.num_lines for want in plan(batches, NEVER, lambda band: rooms[band], tokens)}


def test_the_most_urgent_band_plans_first():
    batches = [open_batch("job", 2, band=Band.INTERACTIVE), open_batch("batch")]
    assert planned(batches, 5) == {"job": 2, "batch": 3}
    assert planned(batches, {Band.INTERACTIVE: 5, Band.STANDARD: 1, Band.BATCH: 0}) == {"job": 2}


def test_tenants_share_lines_by_those_that_run():
    batches = [open_batch("a"), open_batch("b", tenant="other")]
    assert planned(batches, 10) == {"a": 5, "b": 5}
    assert planned(batches, 10, acme=4) == {"a": 3, "b": 7}
    assert planned(batches, 10, acme=40) == {"b": 10}


def test_tenants_share_lines_by_their_tokens():
    batches = [open_batch("a", line_tokens=10.0), open_batch("b", tenant="other", line_tokens=30.0)]
    assert planned(batches, 8) == {"a": 6, "b": 2}
    assert planned(batches, 8, acme=60) == {"a": 4, "b": 4}
    mixed = [open_batch("a", 1, line_tokens=100.0), open_batch("a2", 3, line_tokens=20.0), batches[1]]
    assert planned(mixed, 7) == {"a": 1, "a2": 2, "b": 4}  # a line of acme's counts as 40


def test_of_tenants_with_equally_many_lines_the_one_served_longest_ago_is_next():
    batches = [open_batch(tenant, tenant=tenant) for tenant in ("a", "b", "c")]
    served: list[str] = []
    for _ in range(6):
        [want] = plan(batches, NEVER, lambda band: 1, {}, {name: at for at, name in enumerate(served, 1)})
        served.append(want.batch.tenant)
    assert served == ["a", "b", "c", "a", "b", "c"]


def capacity(num_slots: int, num_busy: int) -> LineCapacity:
    views = [ReplicaView(replica_stats(slots=num_slots), 0.0, num_by_band=(0, 0, num_busy))]
    return LineCapacity(lambda: views, FlowQueue({band: BandLimits(100, 10**6) for band in Band}, 30.0))


@pytest.mark.parametrize(("num_workers", "available"), [(1, 80 + 40), (2, 40 + 20), (3, 27 + 16), (100, 1 + 16)])
def test_a_worker_takes_its_share_of_the_free_slots_and_of_the_lines_ahead(num_workers, available):
    assert capacity(160, 80).available(Band.BATCH, 0, num_workers) == available


def test_a_worker_with_no_free_slot_in_sight_holds_few_lines_ahead():
    assert capacity(32, 32).available(Band.BATCH, 8, 4) == 0
    assert capacity(32, 32).available(Band.BATCH, 0, 4) == capacity(32, 40).available(Band.BATCH, 0, 4) == 8


def test_all_workers_together_report_the_backlog_once():
    backlogs = [BacklogView(SetTime().clock) for _ in range(3)]
    for one in backlogs:
        one.throughput.others = [Speed()] * 2
        one.waiting = [Backlog(Band.BATCH, None, 100, 9000)]
    assert sum(one.num_requests() for one in backlogs) == pytest.approx(100, abs=2)
    assert sum(work.tokens for one in backlogs for work in one.work()) == pytest.approx(9000, abs=3)


def test_estimates_count_the_speed_of_all_workers():
    time = SetTime()
    here, there = ThroughputEstimator(time.clock), ThroughputEstimator(time.clock)
    for one in (here, there):
        one.began("b")
    for _ in range(10):
        time.now += 1
        here.ended([success(leased(50))])
        there.ended([success(leased(150))])
    alone = here.eta_s("b", 1000)
    here.others, there.others = [there.own_speed()], [here.own_speed()]
    assert here.eta_s("b", 1000) == there.eta_s("b", 1000) == pytest.approx(1000 / 200)
    assert alone == pytest.approx(1000 / 50)
    assert here.output_tokens_per_s("acme") == there.output_tokens_per_s("acme") == pytest.approx(10.0, rel=0.2)
    assert here.late_deadline(backlog((100.0, 15_000)), NOW) == NEVER


def test_a_tenants_batches_come_in_their_order():
    assert planned([open_batch("soon", 3), open_batch("later", 50)], 5) == {"soon": 3, "later": 2}
    assert planned([open_batch("a", 2)], 5) == {"a": 2}
    assert planned([open_batch("a")], -3) == {}


@pytest.mark.parametrize(
    ("fields", "late_deadline", "band"),
    [
        ({"expires_unix_s": NOW + 10}, NOW + 10, Band.STANDARD),
        ({"expires_unix_s": NOW + 10, "band_ceiling": Band.BATCH}, NOW + 10, Band.BATCH),
        ({"expires_unix_s": NOW + 10}, NEVER, Band.BATCH),
        ({"expires_unix_s": NOW + 10, "band": Band.INTERACTIVE}, NOW + 10, Band.INTERACTIVE),
        ({}, math.inf, Band.BATCH),
    ],
    ids=["late", "low ceiling", "not late", "urgent already", "no deadline"],
)
def test_a_late_batch_is_raised_no_further_than_it_may_be(fields, late_deadline, band):
    assert raised_band(open_batch("a", **fields), late_deadline) is band


def backlog(*parts: tuple[float | None, int], band: Band = Band.BATCH) -> list[Backlog]:
    return [Backlog(band, None if left is None else NOW + left, 1, tokens) for left, tokens in parts]


@pytest.mark.parametrize(
    ("waiting", "late"),
    [
        (backlog((100.0, 7_000)), NEVER),
        (backlog((100.0, 8_000)), NOW + 100),
        (backlog((100.0, 4_000), (101.0, 4_000)), NOW + 101),
        (backlog((None, 10**9)), NEVER),
        (backlog((100.0, 8_000), band=Band.STANDARD), NEVER),
    ],
    ids=["in time", "too much", "too much together", "no deadline", "urgent already"],
)
def test_a_batch_is_late_when_work_due_by_then_exceeds_its_time(waiting, late):
    time = SetTime()
    throughput = ThroughputEstimator(time.clock)
    for _ in range(60):
        time.now += 1
        throughput.ended([success(leased(100))])
    # 100 tokens a second, and 1.3 times as long is planned for.
    assert throughput.late_deadline(waiting, NOW) == late


def test_without_any_speed_a_batch_is_late_in_its_last_minutes():
    throughput = ThroughputEstimator(SetTime().clock)
    assert throughput.late_deadline(backlog((1000.0, 1)), NOW) == NEVER
    assert throughput.late_deadline(backlog((200.0, 1)), NOW) == NOW + 200


def test_the_time_to_go_follows_the_batchs_own_speed():
    time = SetTime()
    throughput = ThroughputEstimator(time.clock)
    assert throughput.eta_s("b", 1000) is None
    throughput.began("b")
    for _ in range(10):
        time.now += 1
        throughput.ended([success(leased(50))])
    assert throughput.eta_s("b", 1000) == pytest.approx(20.0)
    assert throughput.output_tokens_per_s("acme") == pytest.approx(5.0, rel=0.2)
    assert throughput.output_tokens_per_s("other") == 0.0
    time.now += 100
    assert throughput.eta_s("b", 1000) is None


def test_the_actual_output_of_lines_is_learned():
    throughput = ThroughputEstimator(SetTime().clock)
    assert throughput.actual_per_expected == 1.0
    for _ in range(1000):
        throughput.ended([success(leased(80))])
    assert throughput.actual_per_expected == pytest.approx(0.1, rel=0.01)


def test_every_line_is_planned_at_most_once():
    batches = [open_batch(f"{tenant}{n}", n, tenant) for tenant in "abc" for n in range(4)]
    wanted = plan(batches, NEVER, lambda band: 100, Counter())
    assert {want.batch.id: want.num_lines for want in wanted} == {b.id: b.num_queued for b in batches if b.num_queued}
