"""Figures of the routing experiments, computed from hand-made observations."""

import asyncio

import pytest

from bench.record import ratio
from bench.routing.backlog import Scale as BacklogScale
from bench.routing.backlog import figures_of, judge
from bench.routing.burst import Replicas, decision_delay_s, history, idle_before_first_work_s, num_reversals
from bench.routing.failover import Kill, added_pause_s, streams_hit
from bench.routing.offer import Seen, tokens_computed
from bench.routing.oracle import Arrival, run_oracle
from bench.routing.overload import Scale, goodput, is_good, recovery_s, starvation_s, sustained_rate
from bench.routing.report import Bar, read_options
from bench.routing.tenants import NUM_CLIENTS, measure
from serve_app.benchmark.rows import Row
from testkit.engine.timed_runner import StepTimes
from testkit.router.simulated_time import SimulatedLoop
from tests.unit.bench.rows import offered, row


def test_a_bar_that_was_not_measured_fails():
    assert not Bar("x", None, 1.0).is_kept
    assert Bar("x", 1.0, 1.0).is_kept and not Bar("x", 1.01, 1.0).is_kept
    assert Bar("x", 0.95, 0.95, is_lower_bound=True).is_kept and not Bar("x", 0.9, 0.95, is_lower_bound=True).is_kept
    assert ratio(1.0, None) is None and ratio(1.0, 0.0) is None and ratio(3.0, 2.0) == 1.5


def test_kinds_of_replica_are_chosen_by_name():
    assert all(read_options(None, [], kinds).wants("b") for kinds in ((), ("a", "b")))
    chosen = read_options(None, ["--kinds", "b"], ("a", "b"))
    assert chosen.wants("b") and not chosen.wants("a")
    with pytest.raises(SystemExit):
        read_options(None, ["--kinds", "c"], ("a", "b"))


def test_tokens_computed_counts_prompts_at_their_first_token():
    rows = [row(0.0, ((1.0, 1), (2.0, 3))), row(0.0, ((3.0, 2),)), row(0.0, status=429)]
    assert tokens_computed(rows, 0.0, 2.0) == (10, 1)
    assert tokens_computed(rows, 2.0, 4.0) == (10, 5)


def test_backlog_compares_only_what_ran_beside_the_backlog():
    def interactive(sent_s: float, ttft_s: float, gap_s: float) -> Row:
        return row(sent_s, ((sent_s + ttft_s, 1), (sent_s + ttft_s + gap_s, 1)), stream="interactive")

    batch = [row(0.0, chunks, stream="batch") for chunks in (((1.0, 1), (6.0, 40)), ((5.0, 1), (8.0, 50)))]
    both = offered(interactive(2.0, 0.2, 0.13), interactive(6.0, 9.0, 9.0), *batch)
    alone = offered(interactive(2.0, 0.1, 0.1), interactive(6.0, 0.1, 0.1))
    scale = BacklogScale("timed", 2, 50, 2.0, 5.0, 1.0, 1.5, 1.3)
    figures = figures_of(scale.lead_s, alone, both, offered(*batch))
    assert figures["backlog_stands_until_s"] == 5.0
    assert figures["ttft_p99_ratio"] == pytest.approx(2.0)
    assert figures["gap_p99_ratio"] == pytest.approx(1.3)
    assert figures["share_beside"] == 0.5 and figures["num_batch_lost"] == 0
    kept = {bar.name: bar.is_kept for bar in judge(scale, figures)}
    assert kept["timed: interactive TTFT p99, with backlog / without"] is False
    assert kept["timed: batch requests lost"] is True


@pytest.mark.parametrize(
    ("rows", "expected_s"),
    [
        # From 4.0 to 9.0; nobody waits from 9 to 20.
        (
            [
                *(row(sent_s, ((at_s, 1),)) for sent_s, at_s in ((0.0, 1.0), (0.5, 9.0), (2.0, 4.0), (20.0, 20.5))),
                row(30.0, status=429),
            ],
            5.0,
        ),
        ([row(1.0, end_s=61.0, status=504)], 60.0),
        ([], 0.0),
    ],
    ids=["waiting", "failed", "nobody"],
)
def test_starvation_is_time_without_a_start_in_the_band(rows: list[Row], expected_s: float):
    assert starvation_s(rows) == expected_s


@pytest.mark.parametrize(("start_s", "end_s", "per_s"), [(0.0, 0.55, 1 / 0.55), (0.0, 4.0, 5 / 4), (1.0, 4.0, 0.0)])
def test_goodput_counts_tokens_when_they_came(start_s: float, end_s: float, per_s: float):
    rows = [row(0.0, ((0.5, 1), (0.6, 4))), row(0.0, ((2.0, 1), (3.0, 9)))]
    assert goodput(rows, start_s, end_s) == pytest.approx(per_s)


@pytest.mark.parametrize(("last_sent_s", "expected"), [(0.0, False), (5.0, True)])
def test_a_request_is_good_from_the_attempt_that_was_served(last_sent_s: float, expected: bool):
    assert is_good(row(0.0, ((5.5, 1),), last_sent_s=last_sent_s)) is expected


@pytest.mark.parametrize(("bad_until_s", "expected_s"), [(100.0, 0.0), (106.0, 6.0), (1000.0, None)])
def test_recovery_is_the_first_of_the_final_good_windows(bad_until_s, expected_s):
    scale = Scale(before_s=50.0, overload_s=50.0, after_s=50.0, window_s=2.0)

    def at(sent_s: float) -> Row:
        is_bad = 50.0 <= sent_s < bad_until_s
        return row(sent_s, ((sent_s + (3.0 if is_bad else 0.1), 1),))

    found = recovery_s([at(number / 10) for number in range(1500)], 50.0, 100.0, scale)
    assert found == (None if expected_s is None else pytest.approx(expected_s, abs=0.5))


def test_the_rate_of_a_flood_leaves_out_its_end():
    rows = [row(0.0, ((float(number + 1), 1),)) for number in range(9)] + [row(0.0, ((100.0, 1),))]
    assert sustained_rate(rows) == 1.0


def look(at_s: float, target: int, running: str = "", busy: str = "") -> Seen:
    return Seen(1000.0 + at_s, Replicas(target, frozenset(running), frozenset(busy)))


def test_the_decision_is_when_the_target_rises_after_the_burst():
    seen = [look(0.0, 1), look(9.9, 1), look(10.1, 1), look(11.5, 3), look(12.0, 4)]
    assert decision_delay_s(seen, 1010.0) == pytest.approx(1.5)
    assert decision_delay_s(seen[:3], 1010.0) is None


def test_a_new_replica_is_idle_until_it_is_seen_with_work():
    seen = [look(0.0, 1, "a"), look(1.0, 3, "ab"), look(1.5, 3, "ab", "ab"), look(2.0, 3, "abc"), look(9.0, 3, "abc")]
    assert idle_before_first_work_s(seen, 1005.0) == {"b": 0.5, "c": 7.0}
    assert idle_before_first_work_s(seen, 1001.5) == {"b": 0.5}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [([1, 1, 2, 4, 4, 3, 1, 1, 4, 1], 2), ([1, 2, 1, 2, 1, 2, 1], 3), ([4, 2, 1, 1, 3], 0)],
)
def test_following_a_wave_is_one_reversal_a_period(targets: list[int], expected: int):
    assert num_reversals(targets) == expected


def test_history_has_each_change_once():
    seen = [look(0.0, 1, "a"), look(1.0, 1, "a"), look(2.0, 2, "a"), look(3.0, 2, "ab")]
    assert [change["at_s"] for change in history(seen, 1000.0)] == [0.0, 2.0, 3.0]


def test_a_stream_is_hit_if_it_was_in_mid_decode_on_the_replica():
    kill = Kill(1005.0, "r1", 1, 3)
    during = row(0.0, ((1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (7.5, 1), (8.5, 1)), replica_id="r1")
    elsewhere = row(0.0, ((1.0, 1), (8.0, 1)), replica_id="r2")
    over = row(0.0, ((1.0, 1), (4.0, 1)), replica_id="r1")
    prefilling = row(4.0, ((6.0, 1), (8.0, 1)), replica_id="r1")
    assert streams_hit([during, elsewhere, over, prefilling], kill, 1000.0) == [during]
    assert added_pause_s(during, [kill], 1000.0) == pytest.approx(2.5)
    assert added_pause_s(elsewhere, [kill], 1000.0) is None


STEP = StepTimes(base_s=0.01, per_decode_s=0.0, per_prefill_token_s=0.001)


@pytest.mark.parametrize(
    ("arrivals", "num_replicas", "budget", "ttft_s"),
    [
        pytest.param([Arrival(0.0, 1, 20, 5)] * 2, 2, 512, [0.03, 0.03], id="serves at once while slots are free"),
        pytest.param([Arrival(0.0, 1, 100, 1)], 1, 40, [0.03 + 0.1], id="chunks prompts by the budget"),
    ],
)
def test_the_oracle_serves_at_once_and_chunks_prompts(
    arrivals: list[Arrival], num_replicas: int, budget: int, ttft_s: list[float]
):
    assert run_oracle(arrivals, STEP, num_replicas, 1, budget).ttft_s == pytest.approx(ttft_s)


def test_the_oracle_prefers_urgent_work_at_the_first_free_slot():
    arrivals = [Arrival(0.0, 1, 10, 101), Arrival(0.0, 1, 10, 11), Arrival(0.001, 2, 10, 1), Arrival(0.002, 0, 10, 1)]
    ttft_s = run_oracle(arrivals, STEP, 2, 1, 512).ttft_s
    # The second request ends after its prefill of 20 ms and ten decodes of 10 ms; then the urgent one goes first.
    assert ttft_s[3] == pytest.approx(0.12 + 0.02 - 0.002)
    assert ttft_s[2] == pytest.approx(0.14 + 0.02 - 0.001)


@pytest.mark.parametrize(("num_tokens", "gap_s"), [(11, 0.01), (1, 0.0)])
def test_the_oracle_reports_the_gap_between_tokens(num_tokens: int, gap_s: float):
    assert run_oracle([Arrival(0.0, 1, 10, num_tokens)], STEP, 1, 1, 512).gap_s == pytest.approx(gap_s)


def test_an_idle_tenant_is_served_at_once_beside_a_flood() -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        figures = runner.run(measure(NUM_CLIENTS, warm_up_s=3.0, measured_s=4.0))
    assert figures["idle_refused"] == 0 and figures["idle_requests"] > 1
    assert figures["idle_ttft_p99_ms"] < 400, "simulated time: at most two steps with a whole prefill"
    assert 0 < figures["wasted_share_fairness"] < 0.05
