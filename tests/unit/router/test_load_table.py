from replicas.protocol import Band
from router.load_table import LoadTable
from tests.unit.router.fakes import FakeClock, stats


def known(table: LoadTable) -> list[str]:
    table.check_invariants()
    return [view.stats.replica_id for view in table.views()]


def test_newest_snapshot_wins_whatever_order_they_arrive_in():
    table = LoadTable(FakeClock())
    table.record(stats("a", taken=2.0, running=3))
    table.record(stats("a", taken=1.0, running=9))
    assert [view.stats.num_running for view in table.views()] == [3]


def test_age_is_time_since_the_snapshot_was_received():
    clock = FakeClock()
    table = LoadTable(clock)
    table.record(stats("a"))
    clock.now += 2.5
    assert table.views()[0].age_s == 2.5


def test_a_replica_that_a_poll_misses_is_forgotten():
    clock = FakeClock()
    table = LoadTable(clock)
    table.replace([stats("a"), stats("b")], asked_s=table.now())
    clock.now += 1
    table.replace([stats("b")], asked_s=table.now())
    assert known(table) == ["b"]


def test_a_replica_heard_of_during_a_poll_stays():
    clock = FakeClock()
    table = LoadTable(clock)
    asked_s = table.now()
    clock.now += 0.1
    table.record(stats("new"))
    table.replace([stats("a")], asked_s)
    assert known(table) == ["a", "new"]


def test_in_flight_is_exact_and_outlives_the_entry():
    table = LoadTable(FakeClock())
    first, second = (table.begin("a", Band.STANDARD, prompt_tokens=10, output_tokens=5) for _ in range(2))
    table.record(stats("a"))
    assert table.views()[0].num_in_flight == 2
    assert table.views()[0].outstanding_tokens == 30
    table.forget("a")
    assert known(table) == []
    table.record(stats("a"))
    table.end(first)
    assert table.views()[0].num_in_flight == 1
    table.end(second)
    assert table.views()[0].num_in_flight == 0
    assert table.views()[0].outstanding_tokens == 0
    table.check_invariants()


def test_progress_and_moves_keep_the_sums_right():
    table = LoadTable(FakeClock())
    table.record(stats("a"))
    table.record(stats("b"))
    in_flight = table.begin("a", Band.BATCH, prompt_tokens=10, output_tokens=5)
    assert [view.unseen_tokens for view in table.views()] == [10, 0]
    table.progress(in_flight, 2)
    assert [view.outstanding_tokens for view in table.views()] == [3, 0]
    assert [view.unseen_tokens for view in table.views()] == [0, 0]
    table.progress(in_flight, 50)
    assert [view.outstanding_tokens for view in table.views()] == [1, 0]
    table.move(in_flight, "b")
    table.check_invariants()
    assert [view.num_in_flight for view in table.views()] == [0, 1]
    assert [view.num_by_band for view in table.views()] == [(0, 0, 0), (0, 0, 1)]


def test_load_of_other_ingresses_is_what_is_reported_beyond_our_own():
    table = LoadTable(FakeClock())
    in_flight = table.begin("a", Band.STANDARD, prompt_tokens=1, output_tokens=1)
    table.record(stats("a", running=3, waiting=1))
    assert sum(table.views()[0].num_by_band) == 4
    table.end(in_flight)
    assert sum(table.views()[0].num_by_band) == 3


def test_a_full_table_forgets_the_replica_heard_of_longest_ago():
    clock = FakeClock()
    table = LoadTable(clock, max_replicas=2)
    for replica_id in ("a", "b", "c"):
        table.record(stats(replica_id))
        clock.now += 1
    assert known(table) == ["b", "c"]
