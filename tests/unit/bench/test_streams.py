"""Streams of requests: their schedule, and their way through `headway bench`."""

import asyncio
import itertools
import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from bench.record import percentiles
from bench.routing.offer import RunningLoad, is_void, offer
from bench.routing.streams import Burst, LoadSpec, Phase, Prefixes, Stream, arrivals, make_schedule
from serve_app.benchmark.rows import Outcome
from serve_app.benchmark.workload import Lengths
from testkit.http.api import MODEL, MakeApi, api, card_of, make_api, script, serving, tokenizer
from testkit.limits import LIMIT_S, until
from tests.unit.bench.rows import row

__all__ = ["api", "make_api", "script", "tokenizer"]

PROMPT, OUTPUT = Lengths(64, 64), Lengths(32, 32)
CHAT = Stream("chat", PROMPT, OUTPUT, "interactive", "ann", phases=(Phase(50.0, 20.0),))
DOCUMENTS = Stream("documents", PROMPT, OUTPUT, "batch", bursts=(Burst(5, spread_s=0.5, at_s=1.0),))


def test_the_seed_decides_the_requests() -> None:
    spec = LoadSpec((CHAT, DOCUMENTS), seed=1)
    made = make_schedule(spec)
    assert made == make_schedule(spec) and made == sorted(made, key=lambda each: each.request.time)
    assert make_schedule(replace(spec, seed=2)) != made
    others = make_schedule(replace(spec, prompts_seed=1))
    assert [each.request.time for each in others] == [each.request.time for each in made]
    assert not {str(each.request.prompt) for each in others} & {str(each.request.prompt) for each in made}


def test_a_stream_is_the_same_whatever_runs_beside_it() -> None:
    beside = [each for each in make_schedule(LoadSpec((DOCUMENTS, CHAT))) if each.stream == "chat"]
    assert make_schedule(LoadSpec((CHAT,))) == beside


def test_arrivals_of_a_phase_are_poisson() -> None:
    times = arrivals(replace(CHAT, phases=(Phase(1010.0, 20.0, start_s=10.0),)), random.Random(0))
    assert times[0] >= 10.0 and times[-1] < 1010.0 and times == sorted(times)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.03)
    # Exponential: the deviation equals the mean, and a share of 1 - 1/e is below it.
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap < 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.015)
    # Counts of a second: the variance equals the mean.
    counts = Counter(int(at_s) for at_s in times)
    assert statistics.pvariance([counts[second] for second in range(10, 1010)]) == pytest.approx(20.0, rel=0.15)


def test_bursts_are_even_and_a_rate_of_zero_sends_nothing() -> None:
    stream = replace(CHAT, phases=(Phase(5.0, 0.0),), bursts=(Burst(4, spread_s=0.4, at_s=1.0),))
    assert arrivals(stream, random.Random(0)) == pytest.approx([1.0, 1.1, 1.2, 1.3])


def test_groups_share_a_prefix_and_follow_zipf() -> None:
    schedule = make_schedule(LoadSpec((replace(CHAT, prefixes=Prefixes(num_groups=4, num_tokens=32)),)))
    counts = Counter(str((each.request.prompt or "")[:32]) for each in schedule)
    assert len(counts) == 4
    assert max(counts.values()) / len(schedule) == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.05)


def test_a_hidden_length_is_not_in_max_tokens() -> None:
    [scheduled, *_] = make_schedule(LoadSpec((replace(CHAT, max_tokens=900),)))
    assert scheduled.request.max_tokens == 900
    assert scheduled.request.extra_body == {"seed": 64 + 32, "user": "ann"}


def test_two_streams_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        LoadSpec((CHAT, CHAT))


def test_over_one_percent_late_sends_void_the_run() -> None:
    rows = [row(chunks=((0.1, 1),)) for _ in range(198)]
    late = [row(chunks=((0.1, 1),), sent_s=0.0051) for _ in range(2)]
    assert not is_void([*rows, *late], 0.005)
    assert is_void([*rows[1:], *late], 0.005) and not is_void([*rows[1:], *late], 0.006)


def test_percentiles_are_interpolated() -> None:
    assert percentiles([4.0, 1.0, 2.0, 3.0], (0, 50, 100)) == [1.0, 2.5, 4.0]
    assert percentiles([7.0], (50, 99)) == [7.0, 7.0]


SHORT = Stream("short", Lengths(5, 9), Lengths(3, 3), "batch", "ann", bursts=(Burst(4),))


async def test_an_offered_load_comes_back_by_stream(make_api: MakeApi, tokenizer: PreTrainedTokenizerFast) -> None:
    api = make_api(dispatcher={"card": replace(card_of(tokenizer), vocab_size=4096)})
    spec = LoadSpec((SHORT, replace(SHORT, name="hidden", max_tokens=7)), model=MODEL)
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        offered = await asyncio.to_thread(offer, url, spec)
    assert Counter(row.stream for row in offered.rows) == {"short": 4, "hidden": 4}
    assert {(row.num_output_tokens, row.priority, row.outcome) for row in offered.rows} == {(3, 2, Outcome.OK)}
    assert [row.num_tokens for row in offered.of("short")] == [3] * 4
    sent = api.replica.started[-8:]
    assert sorted(map(len, (request.prompt_token_ids for request in sent))) == sorted(
        row.num_prompt_tokens for row in offered.rows
    )


async def test_a_load_that_is_stopped_cuts_its_open_requests_off(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast
) -> None:
    card = replace(card_of(tokenizer), vocab_size=4096)
    api = make_api(dispatcher={"card": card}, gate_at=2, gate=asyncio.Event())
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        load = RunningLoad(url, LoadSpec((SHORT,), model=MODEL))
        await until(lambda: len(api.replica.running) == 4)
        assert load.is_running
        load.stop()
        offered = await asyncio.to_thread(load.wait)
    assert {row.outcome for row in offered.rows} == {Outcome.CUT_OFF} and len(offered.rows) == 4
