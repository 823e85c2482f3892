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
    table.begin("a")
    table.begin("a")
    table.record(stats("a"))
    assert table.views()[0].num_in_flight == 2
    table.forget("a")
    assert known(table) == []
    table.record(stats("a"))
    table.end("a")
    assert table.views()[0].num_in_flight == 1
    table.end("a")
    assert table.views()[0].num_in_flight == 0
    table.check_invariants()


def test_a_full_table_forgets_the_replica_heard_of_longest_ago():
    clock = FakeClock()
    table = LoadTable(clock, max_replicas=2)
    for replica_id in ("a", "b", "c"):
        table.record(stats(replica_id))
        clock.now += 1
    assert known(table) == ["b", "c"]
