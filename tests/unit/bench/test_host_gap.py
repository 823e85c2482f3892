"""A device's time, computed from marks and intervals; and padding of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.gpu.device_time import MarkedRunner, covered_share
from bench.gpu.host_gap import summarise
from bench.peers.transformers_generate import left_padded
from replicas.engine.batch import ScheduledBatch
from testkit.engine.timed_runner import FinishedStep


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


@pytest.mark.parametrize(
    ("periods_ms", "p50_ms", "p99_ms", "busy_share"),
    [
        pytest.param([10.0] * 99 + [20.0], 2.0, 2.1, 8.0 / 10.1, id="part beyond the device's own time"),
        pytest.param([7.9, 8.1], 0.05, 0.099, 1.0, id="shorter period has no gap"),
    ],
)
def test_a_gap_is_the_period_beyond_the_devices_own_time(
    periods_ms: list[float], p50_ms: float, p99_ms: float, busy_share: float
) -> None:
    gap = summarise(periods_ms, 8.0, 64, None, is_async=False, has_graphs=True)
    found = (gap.gap_p50_ms, gap.gap_p99_ms, gap.busy_share, gap.tokens_per_s)
    tokens_per_s = 64_000 * len(periods_ms) / sum(periods_ms)
    assert found == pytest.approx((p50_ms, p99_ms, busy_share, tokens_per_s))


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


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_padded([(5, 6, 7), (8,)])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
