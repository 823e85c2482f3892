"""The load generator: its schedule, its retries, and its summary of the responses."""

import itertools
import json
import random
import statistics
from collections import Counter

import pytest

from bench.load.retries import retry_delay_s
from bench.load.schedule import arrivals, draw_length, make_schedule
from bench.load.spec import Burst, Component, Lengths, LoadSpec, Phase, Prefixes, Stream, Targets
from bench.load.summary import summarize, table
from bench.record import percentiles
from serve_app.benchmark.rows import Outcome, read_rows, write_rows
from tests.unit.bench.rows import row

CHAT = Stream(name="chat", priority=0, user="ann", phases=(Phase(end_s=50.0, rate_per_s=20.0),))
DOCUMENTS = Stream(name="documents", priority=2, bursts=(Burst(at_s=1.0, count=5, spread_s=0.5),))


def test_the_seed_decides_the_requests():
    spec = LoadSpec(streams=(CHAT, DOCUMENTS), seed=1)
    assert make_schedule(spec) == make_schedule(spec)
    other = make_schedule(spec.model_copy(update={"seed": 2}))
    assert [request.body for request in other] != [request.body for request in make_schedule(spec)]


def test_a_stream_is_the_same_whatever_runs_beside_it():
    alone = make_schedule(LoadSpec(streams=(CHAT,)))
    beside = [r for r in make_schedule(LoadSpec(streams=(DOCUMENTS, CHAT))) if r.row.stream == "chat"]
    assert [(r.row.scheduled_s, r.body) for r in alone] == [(r.row.scheduled_s, r.body) for r in beside]


def test_arrivals_of_a_phase_are_poisson():
    times = arrivals((Phase(start_s=10.0, end_s=1010.0, rate_per_s=20.0),), (), random.Random(0))
    assert times[0] >= 10.0 and times[-1] < 1010.0 and times == sorted(times)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.03)
    # Exponential: the deviation equals the mean, and a share of 1 - 1/e is below it.
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap < 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.015)
    # Counts of a second: the variance equals the mean.
    counts = Counter(int(at_s) for at_s in times)
    per_second = [counts[second] for second in range(10, 1010)]
    assert statistics.pvariance(per_second) == pytest.approx(20.0, rel=0.15)


def test_bursts_are_even_and_a_rate_of_zero_sends_nothing():
    silent = Phase(end_s=5.0, rate_per_s=0.0)
    assert arrivals((silent,), (Burst(at_s=1.0, count=4, spread_s=0.4),), random.Random(0)) == pytest.approx(
        [1.0, 1.1, 1.2, 1.3]
    )


def test_a_mixture_has_its_weights_and_bounds():
    lengths = Lengths(
        parts=(Component(median=10, weight=9), Component(median=1000, sigma=0.3, weight=1)), low=10, high=1500
    )
    rng = random.Random(0)
    drawn = [draw_length(lengths, rng) for _ in range(5000)]
    assert sum(length == 10 for length in drawn) / len(drawn) == pytest.approx(0.9, abs=0.02)
    assert max(drawn) == 1500 or max(drawn) > 1300
    assert 950 < statistics.median(length for length in drawn if length > 10) < 1050


def test_groups_share_a_prefix_and_follow_zipf():
    stream = CHAT.model_copy(update={"prefixes": Prefixes(num_groups=4, num_tokens=32, zipf_exponent=1.0)})
    schedule = make_schedule(LoadSpec(streams=(stream,)))
    prefixes = {(r.row.group, tuple(json.loads(r.body)["prompt"][:32])) for r in schedule}
    assert len(prefixes) == 4
    counts = Counter(r.row.group for r in schedule)
    assert counts[0] / len(schedule) == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.05)
    assert all(r.row.num_prompt_tokens == len(json.loads(r.body)["prompt"]) for r in schedule)


def test_a_body_says_what_the_stream_is():
    [request] = make_schedule(LoadSpec(streams=(DOCUMENTS.model_copy(update={"bursts": (Burst(count=1),)}),)))
    body = json.loads(request.body)
    assert len(body.pop("prompt")) == request.row.num_prompt_tokens
    assert body == {
        "model": "headway-demo", "stream": True, "return_token_ids": True, "ignore_eos": True, "temperature": 0.0,
        "priority": 2, "max_tokens": request.row.num_output_tokens,
    }  # fmt: skip


def test_a_hidden_length_is_not_in_max_tokens():
    stream = CHAT.model_copy(update={"max_tokens": 900})
    request = make_schedule(LoadSpec(streams=(stream,)))[0]
    body = json.loads(request.body)
    assert body["max_tokens"] == 900 and "ignore_eos" not in body
    assert body["seed"] == request.row.num_prompt_tokens + request.row.num_output_tokens


def test_two_streams_with_one_name_are_refused():
    with pytest.raises(ValueError, match="same name"):
        LoadSpec(streams=(CHAT, CHAT))


@pytest.mark.parametrize(
    ("status", "headers", "num_attempts", "shortest_s", "longest_s"),
    [
        *((status, {}, 1, 0.375, 0.5) for status in (408, 409, 429, 500, 503, None)),
        *((status, {}, 2, 0.75, 1.0) for status in (408, 409, 429, 500, 503, None)),
        (429, {"retry-after": "7"}, 1, 7.0, 7.0),
        (429, {"retry-after": "7", "retry-after-ms": "250"}, 1, 0.25, 0.25),
        (404, {"x-should-retry": "true", "retry-after": "2"}, 1, 2.0, 2.0),
    ],
)
def test_retries_come_when_those_of_the_sdk_do(
    status: int | None, headers: dict[str, str], num_attempts: int, shortest_s: float, longest_s: float
):
    delay_s = retry_delay_s(status, headers, num_attempts, random.Random(0))
    assert delay_s is not None and shortest_s <= delay_s <= longest_s


@pytest.mark.parametrize(
    ("status", "headers", "num_attempts"),
    [
        *((status, {}, 3) for status in (408, 409, 429, 500, 503, None)),
        *((status, {}, 1) for status in (400, 401, 404, 413, 422, 499)),
        (429, {"retry-after": "121"}, 1),
        (503, {"x-should-retry": "false"}, 1),
    ],
)
def test_the_sdk_gives_up(status: int | None, headers: dict[str, str], num_attempts: int):
    assert retry_delay_s(status, headers, num_attempts, random.Random(0)) is None


def test_times_count_from_the_scheduled_moment():
    late = row(1.0, chunks=((1.5, 1), (1.7, 2), (1.9, 1)), sent_s=1.2)
    assert late.ttft_s == pytest.approx(0.5)
    assert late.lateness_s == pytest.approx(0.2)
    assert late.tpot_s == pytest.approx(0.4 / 3)
    assert late.inter_token_s == pytest.approx([0.1, 0.1, 0.2])


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.OK),
        ({"finish_reason": "stop"}, Outcome.OK),
        ({"finish_reason": None}, Outcome.TRUNCATED),
        ({"finish_reason": None, "error_code": "replica_lost"}, Outcome.STREAM_ERROR),
        ({"finish_reason": None, "error_code": "client:ClientPayloadError"}, Outcome.FAILED),
        ({"status": 429, "error_code": "server_overloaded"}, Outcome.REFUSED),
        ({"status": 504}, Outcome.SERVER_ERROR),
        ({"status": 400}, Outcome.CLIENT_ERROR),
        ({"status": None, "error_code": "client:TimeoutError"}, Outcome.FAILED),
        ({"is_cut_off": True}, Outcome.CUT_OFF),
    ],
)
def test_outcomes(changes, outcome):
    assert row(chunks=((0.1, 1),), **changes).outcome is outcome


def test_over_one_percent_late_sends_void_the_run():
    spec = LoadSpec(streams=(CHAT,))
    rows = [row(chunks=((0.1, 1),)) for _ in range(198)]
    late = [row(chunks=((0.1, 1),), sent_s=0.0051) for _ in range(2)]
    on_time = summarize(spec, [*rows, *late], 1.0)
    assert on_time["late"]["count"] == 2 and on_time["late"]["share"] == 0.01 and not on_time["is_void"]
    assert on_time["late"]["worst_ms"] == pytest.approx(5.1)
    void = summarize(spec, [*rows[1:], *late, row(sent_s=None)], 1.0)
    assert void["late"]["count"] == 3 and void["is_void"]
    assert "VOID" in table(void) and "VOID" not in table(on_time)


def test_goodput_counts_tokens_of_streams_inside_targets():
    spec = LoadSpec(streams=(CHAT,), targets={0: Targets(ttft_s=0.2, tpot_s=0.1)})
    rows = [
        row(chunks=((0.1, 1), (0.15, 1))),  # good
        row(chunks=((0.1, 3),)),  # good: nothing to miss but the first token
        row(chunks=((0.3, 1), (0.35, 1))),  # late first token
        row(chunks=((0.1, 1), (0.25, 1))),  # slow
        row(chunks=((0.1, 1), (0.15, 1)), finish_reason=None),  # truncated
        row(chunks=((9.0, 7),), priority=2),  # another band, without targets: good
    ]
    figures = summarize(spec, rows, 2.0)
    interactive = figures["bands"]["interactive"]
    expected = {
        "good_requests": 2,
        "goodput_tokens_per_s": 2.5,
        "tokens_per_s": 5.5,
        "outcomes": {"ok": 4, "truncated": 1},
    }
    assert {name: interactive[name] for name in expected} == expected
    assert figures["bands"]["batch"]["good_requests"] == 1
    assert figures["all"]["goodput_tokens_per_s"] == 6.0
    assert (interactive["inter_token_ms"]["p50"], interactive["ttft_ms"]["max"]) == pytest.approx((50.0, 300.0))


def test_percentiles_are_interpolated():
    assert percentiles([4.0, 1.0, 2.0, 3.0], (0, 50, 100)) == [1.0, 2.5, 4.0]
    assert percentiles([7.0], (50, 99)) == [7.0, 7.0]


def test_missing_figures_are_none_and_not_zero():
    assert summarize(LoadSpec(streams=(CHAT,)), [row()], 1.0)["all"]["ttft_ms"] is None


def test_rows_survive_the_file(tmp_path):
    rows = [row(chunks=((0.1, 1), (0.2, 3)), token_ids=[1, 2, 3, 4])]
    write_rows(tmp_path / "rows", rows)
    assert read_rows(tmp_path / "rows") == rows
