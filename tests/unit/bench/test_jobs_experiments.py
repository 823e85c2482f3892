"""Input files of the experiments on jobs, and their figures from hand-made observations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.jobs import interactive, submit, window
from bench.jobs.client import write_lines
from bench.jobs.submit import Call
from bench.routing.offer import Offered, Seen
from bench.routing.streams import Prefixes, Stream
from serve_app.benchmark.workload import Lengths
from tests.unit.bench.rows import offered, row

STREAM = Stream(name="lines", prompt=Lengths(1, 1000, 8, 0.5), output=Lengths(1, 1000, 4, 0.5))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_input_files_are_lines_of_their_own_that_a_batch_accepts(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    write_lines(path, STREAM, 2500, seed=1)
    lines = read(path)
    assert [line["custom_id"] for line in lines] == [f"line-{number}" for number in range(2500)]
    assert len({tuple(line["body"]["prompt"]) for line in lines}) == 2500
    assert not {"stream", "priority", "user"} & set(lines[0]["body"])
    assert lines[0]["url"] == "/v1/completions" and lines[0]["body"]["max_tokens"] > 0


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_lines(tmp_path / name, STREAM, 50, seed)
    assert read(tmp_path / "a") == read(tmp_path / "b") != read(tmp_path / "c")


def test_groups_keep_their_beginning_throughout_a_file(tmp_path: Path) -> None:
    stream = replace(STREAM, prefixes=Prefixes(num_groups=3, num_tokens=20, zipf_exponent=0.0))
    write_lines(tmp_path / "lines", stream, 2100, seed=0)
    assert len({tuple(line["body"]["prompt"][:20]) for line in read(tmp_path / "lines")}) == 3


def test_submission_cost_is_reported_beside_its_baseline() -> None:
    live = [Call("live", "here", 200, 0.0, 0.001 * number, 0.0) for number in range(101)]
    submits = [Call("submit", "here", 202, 0.0, 0.001 * number + 0.004, 0.002) for number in range(101)]
    failed = [Call("live", "here", 503, 0.0, 0.05, 0.0), Call("submit", "here", 0, 0.0, 0.05, 0.0)]
    figures = submit.figures_of([*live, *submits, *failed])
    assert figures["extra_s"] == pytest.approx({"p50": 0.004, "p99": 0.004}, abs=1e-3)
    assert figures["num_failed"] == 2
    assert figures["statuses"]["submit 202"] == 101


def test_submission_has_an_absolute_and_a_relative_bound() -> None:
    slow, quick = {"extra_s": {"p50": 0.012, "p99": 0.039}}, {"extra_s": {"p50": 0.007, "p99": 0.005}}
    assert [bar.is_kept for bar in submit.judge({"here": slow})] == [False, True]
    against = submit.judge({"here": slow, "there": quick})
    assert [bar.value for bar in against] == pytest.approx([12 / 7, 39 / 5])
    assert [bar.is_kept for bar in against] == [True, False]
    assert not any(bar.is_kept for bar in submit.judge({"here": None, "there": quick}))


def test_calls_count_while_the_host_left_the_processors_free() -> None:
    calls = [Call("submit", "here", 202, sent_unix_s, 0.01, 0.0) for sent_unix_s in (10.2, 10.9, 11.5, 12.3, 13.1)]
    looks = [Seen(11.0, 0.5), Seen(12.0, 7.0), Seen(13.0, 0.0)]
    assert [call.sent_unix_s for call in submit.undisturbed_of(calls, looks)] == [10.2, 10.9, 12.3]  # 13.1: not known


def interactive_load(ttft_s: float, gap_s: float) -> Offered:
    chunks = ((1.0 + ttft_s, 1), (1.0 + ttft_s + gap_s, 1))
    return offered(row(1.0, chunks, stream="interactive"))


@pytest.mark.parametrize(("status", "lasted"), [("in_progress", True), ("completed", False)])
def test_a_batch_that_ends_too_soon_proves_nothing(status: str, lasted: bool) -> None:
    batch = {
        "before": {"status": "in_progress", "request_counts": {"completed": 2, "failed": 0}},
        "after": {"status": status, "request_counts": {"completed": 9, "failed": 1}},
    }
    figures = interactive.figures_of(interactive_load(0.1, 0.05), interactive_load(0.14, 0.06), batch)
    assert figures["ttft_p99_ratio"] == pytest.approx(1.4)
    assert figures["gap_p99_ratio"] == pytest.approx(1.2)
    kept = [bar.is_kept for bar in interactive.judge(interactive.QUICK[0], figures)]
    assert kept == [True, True, True, lasted, True]


@pytest.mark.parametrize(("num_completed", "is_kept"), [(990, True), (989, False)])
def test_lines_count_that_were_done_within_the_window(num_completed: int, is_kept: bool) -> None:
    counts = {"completed": num_completed, "failed": 1000 - num_completed}
    ended = {"created_at": 1000, "completed_at": None, "expired_at": 1300, "failed_at": None}
    batch = {"status": "expired", "request_counts": counts, **ended}
    figures = window.figures_of(window.Seen(4.0, 1000, batch, interactive_load(0.1, 0.05), lasted=True))
    assert figures["took_s"] == 300 and figures["num_interactive_failed"] == 0
    kept = [bar.is_kept for bar in window.judge(figures | {"num_backlog_done": 7})]
    assert kept == [is_kept, True, True, True]
