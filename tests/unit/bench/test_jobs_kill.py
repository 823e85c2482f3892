"""The judge of `bench.jobs.kill` sees lost lines, doubled lines and repeated webhooks."""

import random
from collections import Counter
from typing import Any

import pytest

from bench.jobs.kill import Kill, Kind, Scale, Seen, judge, kinds_to_kill

SCALE = Scale(num_lines=4, num_kills=6)


def good(**changes: Any) -> Seen:
    kills = [Kill(0.0, kind.name.lower(), 1) for kind in Kind]
    counts = {"total": 4, "completed": 4, "failed": 0}
    fields: dict[str, Any] = {
        "batch": {"status": "completed", "request_counts": counts},
        "output": [{"custom_id": f"line-{number}"} for number in range(4)],
        "errors": [],
        "kills": kills,
        "jobs": {"job_1": "completed"},
        "webhooks": {"batch_1": ["evt_1", "evt_1"], "job_1": ["evt_2"]},
    }
    return Seen(**{**fields, **changes})


def broken(seen: Seen) -> set[str]:
    _, bars = judge(SCALE, seen)
    return {bar.name for bar in bars if not bar.is_kept}


def test_a_run_in_which_nothing_was_lost_keeps_every_promise():
    assert broken(good()) == set()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"output": [{"custom_id": f"line-{number}"} for number in range(3)]}, {"lines in no file"}),
        ({"output": [{"custom_id": f"line-{number % 4}"} for number in range(5)]}, {"lines more than once"}),
        ({"errors": [{"custom_id": "line-0"}]}, {"lines more than once", "lines that failed"}),
        ({"output": [{"custom_id": f"line-{number}"} for number in range(5)]}, {"lines that are not in the input"}),
        ({"jobs": {"job_1": "failed"}}, {"jobs lost or failed"}),
        ({"jobs": {}}, {"jobs accepted"}),
        ({"webhooks": {"batch_1": []}}, {"ends without a webhook"}),
        ({"webhooks": {"batch_1": ["evt_1", "evt_2"]}}, {"ends with two webhook ids"}),
        ({"kills": []}, {"processes killed", "kinds of process killed"}),
    ],
)
def test_each_broken_promise_is_found(changes, names):
    assert broken(good(**changes)) == names


def test_every_kind_of_process_dies_and_the_whole_several_times():
    counts = Counter(kinds_to_kill(20, random.Random(0)))
    assert sum(counts.values()) == 20
    assert counts[Kind.WHOLE] == 4 and min(counts.values()) >= 3


def test_of_several_jobs_workers_one_dies_in_most_turns():
    counts = Counter(kinds_to_kill(20, random.Random(0), num_workers=4))
    assert counts.keys() == set(Kind) and counts[Kind.JOBS] >= 10 and counts[Kind.WHOLE] == 4
