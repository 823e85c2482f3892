"""Sizes, bands, words and times of the requests."""

import json
import random
import statistics
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from replicas.protocol import Band
from serve_app.benchmark.levels import Arrivals, at_times, limited, times_at
from serve_app.benchmark.prompts import TokenScale
from serve_app.benchmark.sender import ScheduledRequest
from serve_app.benchmark.trace import read_trace
from serve_app.benchmark.workload import Endpoint, Lengths, RequestFactory, Workload


def workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": "m", "endpoint": Endpoint.COMPLETIONS, "prompt_tokens": Lengths(20, 60), "max_tokens": Lengths(8, 8),
    }  # fmt: skip
    return Workload(**{**fields, **changes})


def made(of: Workload, number: int, words_seed: int = 0) -> list[ScheduledRequest]:
    return list(islice(RequestFactory(of, random.Random(words_seed)).requests("load"), number))


def prompts(requests: list[ScheduledRequest]) -> list[list[str]]:
    return [json.loads(request.body)["prompt"].split() for request in requests]


def test_sizes_follow_from_the_seed_and_words_are_new() -> None:
    first, again = made(workload(), 20), made(workload(), 20, words_seed=1)
    assert [request.row for request in first] == [request.row for request in again]
    assert [request.row for request in made(workload(seed=1), 20)] != [request.row for request in first]
    beginnings = [tuple(prompt[:6]) for prompt in prompts(first + again)]
    assert len(set(beginnings)) == len(beginnings)


def test_prompts_have_the_tokens_that_the_scale_promises() -> None:
    scale = TokenScale.through((16, 42), (144, 298))
    assert scale == TokenScale(fixed=10.0, per_word=2.0)
    for request, prompt in zip(made(workload(scale=scale), 9), prompts(made(workload(scale=scale), 9)), strict=True):
        assert abs(10 + 2 * len(prompt) - request.row.num_prompt_tokens) <= 1


def test_a_shared_prefix_is_the_same_in_every_run() -> None:
    of = workload(shared_prefix_tokens=15)
    found = prompts(made(of, 5) + made(of, 5, words_seed=1))
    assert len({tuple(prompt[:15]) for prompt in found}) == 1
    assert len({tuple(prompt[:19]) for prompt in found}) == 10
    assert [len(prompt) for prompt in found[:5]] == [request.row.num_prompt_tokens for request in made(of, 5)]


def test_bands_have_their_shares() -> None:
    of = workload(prompt_tokens=Lengths(1, 1), bands={Band.INTERACTIVE: 0.25, Band.BATCH: 0.75})
    counts = Counter(json.loads(request.body)["priority"] for request in made(of, 2000))
    assert counts.keys() == {0, 2} and counts[0] / 2000 == pytest.approx(0.25, abs=0.04)


def test_a_chat_asks_for_its_usage() -> None:
    [request] = made(workload(endpoint=Endpoint.CHAT, fields={"ignore_eos": True}), 1)
    body = json.loads(request.body)
    assert body.pop("messages")[0]["role"] == "user"
    assert body == {
        "model": "m", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


@pytest.mark.parametrize(("arrivals", "deviation"), [(Arrivals.CONSTANT, 0.0), (Arrivals.POISSON, 0.1)])
def test_requests_leave_at_the_rate(arrivals: Arrivals, deviation: float) -> None:
    requests = RequestFactory(workload(prompt_tokens=Lengths(1, 1)), random.Random(0)).requests("load")
    timed = at_times(requests, times_at(10.0, arrivals, random.Random(0)))
    times = [request.row.scheduled_s for request in limited(timed, 2000, None)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(deviation, rel=0.1, abs=1e-9)


def test_a_duration_ends_what_a_number_does_not() -> None:
    requests = RequestFactory(workload(), random.Random(0)).requests("load")
    timed = at_times(requests, times_at(4.0, Arrivals.CONSTANT, random.Random(0)))
    assert len(limited(timed, None, 2.0)) == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64", Lengths(64, 64)), ("64:512", Lengths(64, 512)), ("16:2048:256:0.6", Lengths(16, 2048, 256.0, 0.6))],
)
def test_lengths_are_read_and_drawn_within_their_bounds(text: str, expected: Lengths) -> None:
    lengths, rng = Lengths.parse(text), random.Random(0)
    assert lengths == expected
    drawn = [lengths.draw(rng) for _ in range(500)]
    assert lengths.low <= min(drawn) <= max(drawn) <= lengths.high
    assert lengths.median is None or statistics.median(drawn) == pytest.approx(lengths.median, rel=0.2)


@pytest.mark.parametrize("text", ["", "x", "0", "9:3", "1:2:3", "8:16:4:0.5", "8:16:12:-1", "1:2:3:4:5"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}'"):
        Lengths.parse(text)


def test_a_trace_is_read_by_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '\ufeff{"time": 2.5, "prompt_tokens": 30, "max_tokens": 4, "band": "batch"}\n'
        '{"time": 0.5, "prompt": "hello there", "max_tokens": 3}\n'
    )
    requests = list(RequestFactory(workload(), random.Random(0)).traced(read_trace(path), "trace"))
    assert [request.row.scheduled_s for request in requests] == [0.5, 2.5]
    bodies = [json.loads(request.body) for request in requests]
    assert (bodies[0]["prompt"], bodies[0]["max_tokens"], bodies[1]["priority"]) == ("hello there", 3, 2)
    assert "priority" not in bodies[0] and len(bodies[1]["prompt"].split()) == 30


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"time": 0, "max_tokens": 1}', "prompt_tokens"),
        ('{"time": -1, "prompt": "a", "max_tokens": 1}', "time"),
        ('{"time": 0, "prompt": "a", "max_tokens": 1, "band": "urgent"}', "'urgent'"),
        ('{"time": 0, "prompt": "a", "max_tokens": 1, "tokens": 2}', "tokens"),
        ("no JSON", "JSON"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "prompt": "a", "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"line 2: .*{words}"):
        read_trace(path)
