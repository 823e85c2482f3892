"""A rate over a sliding window of time."""

import random

import pytest

from replicas.timing.rates import SlidingRate


def test_rate_is_the_sum_of_the_window_over_its_length() -> None:
    rate = SlidingRate(window_s=4.0)
    rate.add(30, 100.0)
    rate.add(10, 103.0)

    assert rate.per_s(104.0) == 10.0
    assert rate.per_s(104.5) == 2.5
    assert rate.per_s(108.0) == 0.0


def test_before_anything_is_added_the_rate_is_zero() -> None:
    assert SlidingRate(window_s=4.0).per_s(100.0) == 0.0
    assert SlidingRate(window_s=4.0, start_s=100.0).per_s(100.0) == 0.0


def test_while_younger_than_the_window_the_rate_is_over_the_age() -> None:
    rate = SlidingRate(window_s=60.0, start_s=100.0)
    rate.add(20, 102.0)

    assert rate.per_s(104.0) == 5.0
    assert rate.per_s(140.0) == 0.5


def test_a_first_amount_is_divided_by_the_resolution() -> None:
    rate = SlidingRate(window_s=60.0, start_s=100.0, resolution_s=1.0)
    rate.add(20, 100.0)

    assert rate.per_s(100.0) == 20.0


def test_an_amount_with_a_duration_counts_inside_the_window() -> None:
    rate = SlidingRate(window_s=3.0)
    for second in range(1, 11):
        rate.add(100, float(second), duration_s=1.0)

    assert rate.per_s(10.0) == 100.0

    rate.add(50, 10.5, duration_s=0.5)

    assert rate.per_s(10.5) == 100.0


def test_uneven_intervals_do_not_change_a_constant_rate() -> None:
    rng, rate, now = random.Random(1), SlidingRate(window_s=3.0, start_s=0.0), 0.0
    for _ in range(200):
        duration_s = rng.uniform(0.1, 5.0)
        now += duration_s
        rate.add(40 * duration_s, now, duration_s)

        assert rate.per_s(now) == pytest.approx(40.0)


def test_changes_of_a_level_add_up_to_its_slope() -> None:
    rate, level = SlidingRate(window_s=3.0), 0
    for second, after in enumerate([300, 500, 200, 200, 50]):
        rate.add(after - level, float(second), duration_s=1.0)
        level = after

    assert rate.per_s(4.0) == (50 - 500) / 3.0


def test_a_clock_of_step_time_gives_the_rate_of_steps_alone() -> None:
    rate, computing_s = SlidingRate(window_s=2.0, start_s=0.0), 0.0
    for duration_s in [0.5] * 8:
        computing_s += duration_s
        rate.add(16, computing_s, duration_s)

    assert rate.per_s(computing_s) == 32.0


def test_resolution_bounds_what_is_kept_and_keeps_the_rate() -> None:
    fine, coarse = SlidingRate(window_s=60.0), SlidingRate(window_s=60.0, resolution_s=1.0)
    for tick in range(20_000):
        for rate in (fine, coarse):
            rate.add(1, tick / 100)

    assert len(coarse._amounts) <= 62
    assert coarse.per_s(200.0) == pytest.approx(fine.per_s(200.0), rel=0.01)


def test_rounding_errors_leave_with_the_amounts() -> None:
    rate = SlidingRate(window_s=1.0)
    for second in range(1000):
        rate.add(0.1 * second, float(second))

    assert rate.per_s(2000.0) == 0.0
