"""Load of the replicas as an ingress knows it: its own requests exactly, those of others as last reported."""

import random
from dataclasses import replace

import pytest

from replicas.protocol import Band, IngressShare, ReplicaStats
from router.balancing.load_table import InFlight, LoadTable
from router.types import ReplicaView
from testkit.router.simulated_replicas import stats
from testkit.router.simulated_time import FakeClock


def known(table: LoadTable) -> list[str]:
    table.check_invariants()
    return [view.stats.replica_id for view in table.views()]


def only(table: LoadTable) -> ReplicaView:
    table.check_invariants()
    [view] = table.views()
    return view


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> LoadTable:
    return LoadTable(clock)


def table_of(*reported: ReplicaStats) -> LoadTable:
    table = LoadTable(FakeClock())
    for report in reported:
        table.record(report)
    return table


def begin_all(table: LoadTable, share: IngressShare) -> None:
    """Count the requests of a share as own ones."""
    for band in Band:
        for _ in range(share.num_by_band[band]):
            table.begin("a", band, 1, 1)


def test_newest_snapshot_wins_whatever_order_they_arrive_in():
    table = table_of(stats(taken=2.0, running=(0, 3, 0)), stats(taken=1.0, running=(0, 9, 0)))
    assert only(table).stats.num_running == 3


def test_age_is_time_since_the_snapshot_was_received(clock: FakeClock, table: LoadTable):
    table.record(stats())
    clock.now += 2.5
    assert only(table).age_s == 2.5


def test_a_replica_that_a_poll_misses_is_forgotten(clock: FakeClock, table: LoadTable):
    assert table.replace([stats("a"), stats("b")], asked_s=table.now()).gone == []
    clock.now += 1
    assert table.replace([stats("b")], asked_s=table.now()).gone == ["a"]
    assert known(table) == ["b"]


def test_a_replica_lost_before_the_poll_that_misses_it_is_gone(clock: FakeClock, table: LoadTable):
    table.replace([stats("a"), stats("b")], asked_s=table.now())
    table.forget("a")
    clock.now += 1
    assert table.replace([stats("b")], asked_s=table.now()).gone == ["a"]
    assert list(table.ring) == ["b"]
    assert table.replace([stats("b")], asked_s=table.now()).gone == []


def test_a_replica_heard_of_during_a_poll_stays(clock: FakeClock, table: LoadTable):
    asked_s = clock.now
    clock.now += 0.1
    table.record(stats("new"))
    assert table.replace([stats("a")], asked_s).gone == []
    assert known(table) == ["a", "new"]


def test_a_full_table_forgets_the_replica_heard_of_longest_ago():
    clock = FakeClock()
    table = LoadTable(clock, max_replicas=2)
    for replica_id in ("a", "b", "c"):
        table.record(stats(replica_id))
        clock.now += 1
    assert known(table) == ["b", "c"]


def test_a_request_counts_as_soon_as_it_is_sent():
    table = table_of(stats(slots=4))
    table.begin("a", Band.BATCH, prompt_tokens=100, output_tokens=20)
    view = only(table)
    assert (view.num_in_flight, view.num_by_band, view.outstanding_tokens) == (1, (0, 0, 1), 120)
    assert view.num_free_slots(Band.BATCH) == 3
    assert view.num_free_slots(Band.STANDARD) == 4, "an urgent request takes the slots of lower bands"


def test_own_counts_survive_a_forgotten_replica(table: LoadTable):
    first, second = (table.begin("a", Band.STANDARD, 10, 5) for _ in range(2))
    table.record(stats())
    assert only(table).num_in_flight == 2
    table.forget("a")
    assert known(table) == []
    table.record(stats())
    table.end(first)
    assert only(table).num_in_flight == 1
    table.end(second)
    assert (only(table).num_in_flight, only(table).outstanding_tokens) == (0, 0)


def test_load_of_other_ingresses_is_reported_load_less_the_own_part(table: LoadTable):
    own = table.begin("a", Band.STANDARD, 10, 90)
    table.record(stats(running=(1, 2, 0), waiting=(0, 0, 3), outstanding=500, own=(0, 1, 0), own_tokens=100))
    assert (only(table).num_by_band, only(table).outstanding_tokens) == ((1, 2, 3), 500)
    table.end(own)
    left = only(table)
    assert (left.num_by_band, left.outstanding_tokens) == ((1, 1, 3), 400), "nothing of the others' leaves"


def test_a_request_that_a_report_does_not_count_yet_comes_on_top(table: LoadTable):
    report = stats(slots=4, running=(0, 3, 0), own=(0, 1, 0))
    table.begin("a", Band.STANDARD, 10, 90)
    for num_sent in range(3):
        table.record(report)  # Every delta of a step brings the same one.
        assert only(table).num_free_slots(Band.STANDARD) == 1 - num_sent
        table.begin("a", Band.STANDARD, 10, 90)


def test_a_report_that_several_deltas_bring_is_stored_once(clock: FakeClock, table: LoadTable):
    report = stats(running=(0, 1, 0))
    assert table.record(report)
    changed = table.subscribe()
    changed.clear()
    assert not table.record(report) and not changed
    table.forget("a")
    assert table.record(report) and len(table) == 1


def test_a_poll_in_another_order_changes_what_is_new(clock: FakeClock, table: LoadTable):
    a, b, c = (replace(stats(replica_id), version=3) for replica_id in "abc")
    table.replace([a, b], clock.now)
    assert table.replace([c, b, a], clock.now).changed == [c]
    assert table.replace([b], clock.now + 1).changed == [] and len(table) == 1
    assert table.replace([b, a], clock.now).changed == [a], "it was forgotten"


def test_parts_of_a_report_are_told_apart_by_ingress():
    shares = [IngressShare("one", (1, 1, 0), 50), IngressShare("two", (0, 1, 2), 70)]
    table = LoadTable(FakeClock(), "two")
    own = [table.begin("a", band, 10, 20) for band in (Band.STANDARD, Band.BATCH, Band.BATCH)]
    table.record(stats(running=(1, 2, 0), waiting=(0, 0, 2), outstanding=120, by_ingress=shares))
    assert only(table).num_by_band == (1, 2, 2)
    for in_flight in own:
        table.end(in_flight)
    assert (only(table).num_by_band, only(table).outstanding_tokens) == ((1, 1, 0), 50)


def test_an_aborted_request_takes_its_slot_until_a_report_without_it(table: LoadTable):
    report = stats(slots=4, running=(0, 3, 0), own=(0, 3, 0), own_tokens=30, outstanding=30)
    own = [table.begin("a", Band.STANDARD, 5, 5) for _ in range(3)]
    table.end(own.pop())
    table.record(report)
    assert (only(table).num_by_band, only(table).outstanding_tokens) == ((0, 3, 0), 30)
    table.record(stats(slots=4, taken=1.0, running=(0, 2, 0), own=(0, 2, 0), own_tokens=20, outstanding=20))
    assert (only(table).num_by_band, only(table).outstanding_tokens) == ((0, 2, 0), 20)


def test_ingresses_share_out_the_free_slots_that_a_report_tells_them_of():
    rng = random.Random(1)
    for version in range(1, 200):
        names = [f"ingress-{number}" for number in range(rng.randint(1, 5))]
        shares = [IngressShare(name, (1, rng.randrange(3), rng.randrange(3)), 0) for name in names]
        by_band = [sum(share.num_by_band[band] for share in shares) for band in Band]
        report = replace(stats(slots=30, running=by_band, by_ingress=shares), version=version)
        tables = [LoadTable(FakeClock(), name) for name in names]
        for table, share in zip(tables, shares, strict=True):
            begin_all(table, share)
            table.record(report)
        for band in Band:
            free = [only(table).num_free_slots(band) for table in tables]
            assert sum(free) == 30 - sum(by_band[: band + 1])
            assert max(free) - min(free) <= 1


def test_ingresses_leave_slots_to_those_with_requests_as_urgent():
    shares = [IngressShare("jobs", (0, 0, 6), 0), IngressShare("http", (1, 1, 0), 0)]
    report = replace(stats(slots=10, running=(1, 1, 6), by_ingress=shares), version=1)
    free = {}
    for name in ("jobs", "http", "new"):
        table = LoadTable(FakeClock(), name)
        for share in shares:
            if share.ingress_id == name:
                begin_all(table, share)
        table.record(report)
        free[name] = [only(table).num_free_slots(band) for band in Band]
    assert free["http"][:2] == [9, 8], "a worker with batch requests alone takes nothing from others"
    assert free["http"][2] + free["jobs"][2] == 2
    assert free["new"][2] >= 1


@pytest.mark.parametrize("num_ingresses", [2, 3, 8])
@pytest.mark.parametrize("step", [1, 2, 8])
def test_slots_that_other_ingresses_leave_are_taken_after_a_few_reports(num_ingresses: int, step: int):
    num_slots = 16
    others = [IngressShare(f"other-{number}", (0, 1, 0), 0) for number in range(num_ingresses - 1)]
    table, num_own, version = LoadTable(FakeClock(), "own"), 0, step
    while num_own + len(others) < num_slots:
        shares = [*others, IngressShare("own", (0, num_own, 0), 0)]
        report = stats(slots=num_slots, running=(0, num_own + len(others), 0), by_ingress=shares)
        table.record(replace(report, version=version))
        for _ in range(only(table).num_free_slots(Band.STANDARD)):
            table.begin("a", Band.STANDARD, 1, 1)
            num_own += 1
        assert only(table).num_free_slots(Band.STANDARD) == 0 and num_own + len(others) <= num_slots
        version += step
    assert version <= 8 * num_ingresses * step


def test_prompts_are_unseen_until_their_first_output():
    table = table_of(stats(free_blocks=100))
    own = table.begin("a", Band.STANDARD, prompt_tokens=30, output_tokens=5)
    assert (only(table).unseen_tokens, only(table).num_free_tokens(Band.STANDARD)) == (30, 400 - 30)
    table.progress(own, 1)
    assert only(table).unseen_tokens == 0
    assert only(table).outstanding_tokens == 4, "the prompt is computed, and one token given"


def test_blocks_of_lower_bands_count_as_free():
    view = only(table_of(stats(free_blocks=10, held=(100, 200, 300))))
    assert [view.num_free_tokens(band) // 4 for band in Band] == [510, 310, 10]


def test_a_draining_replica_has_no_slots():
    assert only(table_of(stats(is_draining=True))).num_free_slots(Band.INTERACTIVE) == 0


def test_a_token_stays_outstanding_until_the_end():
    table = table_of(stats())
    own = table.begin("a", Band.STANDARD, 3, 2)
    for _ in range(50):
        table.progress(own, 7)
        assert only(table).outstanding_tokens == 1
    table.end(own)
    assert only(table).outstanding_tokens == 0


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(30))
def test_polls_of_unchanged_replicas_leave_the_table_as_if_they_were_recorded(seed: int):
    """A version saves work, and changes nothing: beside a table whose reports have none."""
    rng = random.Random(seed)
    clock = FakeClock()
    tables = LoadTable(clock), LoadTable(clock)
    own: list[tuple[InFlight, InFlight]] = []
    reports = {replica_id: replace(stats(replica_id), version=1) for replica_id in "abc"}
    for _ in range(200):
        clock.now += 1
        replica_id = rng.choice("abc")
        match rng.randrange(5):
            case 0:
                band, sizes = rng.choice(list(Band)), (rng.randrange(1, 50), rng.randrange(50))
                first, second = (table.begin(replica_id, band, *sizes) for table in tables)
                own.append((first, second))
            case 1 if own:
                ended = own.pop(rng.randrange(len(own)))
                for table, in_flight in zip(tables, ended, strict=True):
                    table.end(in_flight)
            case 2:
                running = [rng.randrange(4) for _ in Band]
                known = reports[replica_id]
                reports[replica_id] = replace(
                    known, num_running_by_band=tuple(running), outstanding_tokens=rng.randrange(500),
                    version=known.version + 1,
                )  # fmt: skip
            case _:
                polled = [
                    replace(report, taken_unix_s=clock.now, stalled_s=rng.random()) for report in reports.values()
                ]
                tables[0].replace(polled, clock.now)
                tables[1].replace([replace(report, version=0) for report in polled], clock.now)
        for table in tables:
            table.check_invariants()
        views = [
            [replace(view, stats=replace(view.stats, version=0, taken_unix_s=0.0)) for view in table.views()]
            for table in tables
        ]
        assert views[0] == views[1]
        assert tables[0].cluster() == tables[1].cluster()


def test_an_unchanged_answer_to_a_poll_is_no_change(clock: FakeClock, table: LoadTable):
    report = replace(stats("a"), version=7)
    assert table.replace([report], clock.now).changed == [report]
    changed = table.subscribe()
    changed.clear()
    clock.now += 1
    later = replace(report, taken_unix_s=1.0)
    assert table.replace([later], clock.now).changed == []
    assert not changed and only(table).age_s == 0.0
    table.begin("a", Band.STANDARD, 10, 10)
    assert table.replace([later], clock.now).changed == []
    stalled = replace(report, taken_unix_s=1.0, stalled_s=0.5)
    assert table.replace([stalled], clock.now).changed == [stalled] and only(table).stats.stalled_s == 0.5
    again = replace(report, taken_unix_s=2.0)
    assert table.replace([again], clock.now).changed == [again] and only(table).stats.stalled_s == 0.0
    assert table.replace([again], clock.now).changed == []
    of_delta = replace(report, version=8, taken_unix_s=3.0)
    table.record(of_delta)
    assert table.replace([of_delta], clock.now).changed == [of_delta], "only polls tell of served tokens"


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_counted_twice_or_lost_in_random_histories(seed: int):
    """Requests of this ingress and of others on the replicas. Every report counts both."""
    rng = random.Random(seed)
    clock = FakeClock()
    table = LoadTable(clock, max_replicas=5)
    ids = ["a", "b", "c"]
    foreign = {replica_id: [0, 0, 0] for replica_id in ids}
    own: list[InFlight] = []

    def report(replica_id: str) -> None:
        by_band = [sum(f.replica_id == replica_id and f.band is band for f in own) for band in Band]
        total = [own + other for own, other in zip(by_band, foreign[replica_id], strict=True)]
        own_tokens = sum(f.outstanding_tokens for f in own if f.replica_id == replica_id)
        outstanding = own_tokens + 100 * sum(foreign[replica_id])
        table.record(
            stats(
                replica_id, taken=clock.now, running=total, outstanding=outstanding, own=by_band, own_tokens=own_tokens
            )
        )  # fmt: skip

    for _ in range(300):
        clock.now += rng.random()
        replica_id = rng.choice(ids)
        match rng.randrange(6):
            case 0 | 1:
                own.append(table.begin(replica_id, rng.choice(list(Band)), rng.randrange(1, 50), rng.randrange(50)))
            case 2 if own:
                table.progress(rng.choice(own), rng.randrange(5))
            case 3 if own:
                table.move(rng.choice(own), replica_id)
            case 4 if own:
                table.end(own.pop(rng.randrange(len(own))))
            case _:
                foreign[replica_id][rng.randrange(3)] = rng.randrange(4)
                report(replica_id)
        table.check_invariants()
        for view in table.views():
            here = [f for f in own if f.replica_id == view.stats.replica_id]
            assert view.num_in_flight == len(here)
            assert view.unseen_tokens == sum(f.prompt_tokens for f in here if not f.is_seen)
    for replica_id in ids:
        report(replica_id)
    for view in table.views():
        replica_id = view.stats.replica_id
        outstanding = sum(f.outstanding_tokens for f in own if f.replica_id == replica_id)
        assert sum(view.num_by_band) == view.num_in_flight + sum(foreign[replica_id])
        assert view.outstanding_tokens == outstanding + 100 * sum(foreign[replica_id])
    while own:
        table.end(own.pop())
    for view in table.views():
        assert view.num_by_band == tuple(foreign[view.stats.replica_id])
        assert view.outstanding_tokens == 100 * sum(foreign[view.stats.replica_id])
    table.check_invariants()
