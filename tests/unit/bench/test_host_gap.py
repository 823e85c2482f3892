"""What is told about a device's time follows from marks and intervals, whatever made them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.gpu.device_time import MarkedRunner, covered_share
from bench.gpu.host_gap import summarise
from bench.gpu.mixed_trace import left_padded, make_trace
from bench.timed_runner import FinishedStep
from replicas.engine.batch import ScheduledBatch


@dataclass
class FakeMark:
    at_ms: float

    def ms_until(self, later: FakeMark) -> float:
        return later.at_ms - self.at_ms


class NothingRunner:
    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        return FinishedStep([])


def test_periods_are_between_the_ends_of_neighbouring_steps() -> None:
    moments = iter([0.0, 5.0, 11.0, 12.0])
    runner = MarkedRunner(NothingRunner(), lambda: FakeMark(next(moments)))
    for _ in range(4):
        runner.launch(ScheduledBatch(()))
    assert runner.take_periods_ms() == [5.0, 6.0, 1.0]
    assert runner.take_periods_ms() == []


def test_a_gap_is_what_a_period_has_beyond_the_devices_own_time() -> None:
    gap = summarise([10.0] * 99 + [20.0], 8.0, 64, None, is_async=False, has_graphs=True)
    assert gap.gap_p50_ms == 2.0 and gap.gap_p99_ms == pytest.approx(2.1)
    assert gap.busy_share == pytest.approx(8.0 / 10.1)
    assert gap.tokens_per_s == pytest.approx(64_000 / 10.1)


def test_a_period_shorter_than_the_devices_time_is_no_gap() -> None:
    gap = summarise([7.9, 8.1], 8.0, 1, 0.9, is_async=True, has_graphs=True)
    assert gap.gap_p50_ms == pytest.approx(0.05) and gap.busy_share == 1.0


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([], None),
        ([(3.0, 3.0)], None),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (0.5, 1.0)], 3.5 / 4.0),
    ],
)
def test_covered_share_counts_what_overlaps_once(intervals: list[tuple[float, float]], share: float | None) -> None:
    found = covered_share(intervals)
    assert found == (None if share is None else pytest.approx(share))


def test_the_trace_is_the_same_for_every_engine() -> None:
    trace = make_trace(20)
    assert trace == make_trace(20)
    assert len({len(request.prompt) for request in trace}) > 10


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_padded([(5, 6, 7), (8,)])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
