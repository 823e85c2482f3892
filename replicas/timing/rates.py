"""Rate over a sliding window of time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Amount:
    start_s: float
    end_s: float
    amount: float


class SlidingRate:
    """Mean rate of an amount over the last `window_s` seconds.

    The rate is the sum of the amounts in the window, divided by the length of the window, or by the time since
    `start_s` while that is shorter. An amount counts at the moment at which it is added, or evenly over a time that
    ends there; only the part inside the window counts.

    The caller supplies the time, which never goes back. It may be any clock: monotonic time, or the sum of the
    durations of steps, which stands still between two steps.

    Invariant: `_sum` is the sum of the amounts kept.
    """

    def __init__(self, window_s: float, start_s: float = float("-inf"), resolution_s: float = 0.0) -> None:
        """Time before `start_s` is left out of the rate; by default it counts, with an amount of zero.

        Amounts less than `resolution_s` apart are merged, so at most about `window_s / resolution_s` are kept. The rate
        is over at least `resolution_s`.
        """
        self._window_s = window_s
        self._start_s = start_s
        self._resolution_s = resolution_s
        self._amounts: deque[_Amount] = deque()
        self._sum = 0.0

    def add(self, amount: float, now_s: float, duration_s: float = 0.0) -> None:
        """Count an amount that came at `now_s`, or evenly over the `duration_s` before it."""
        self._forget_before(now_s - self._window_s)
        self._sum += amount
        newest = self._amounts[-1] if self._amounts else None
        if newest is not None and now_s - newest.start_s < self._resolution_s:
            newest.end_s = now_s
            newest.amount += amount
        else:
            self._amounts.append(_Amount(now_s - duration_s, now_s, amount))

    def per_s(self, now_s: float) -> float:
        """Return the rate at `now_s`; 0 while no time is covered."""
        window_start_s = now_s - self._window_s
        self._forget_before(window_start_s)
        covered_s = min(self._window_s, max(self._resolution_s, now_s - self._start_s))
        if not self._amounts or covered_s <= 0:
            return 0.0
        oldest = self._amounts[0]
        outside_s = max(0.0, window_start_s - oldest.start_s)
        outside = oldest.amount * outside_s / (oldest.end_s - oldest.start_s) if outside_s else 0.0
        return (self._sum - outside) / covered_s

    def _forget_before(self, window_start_s: float) -> None:
        while self._amounts and self._amounts[0].end_s < window_start_s:
            self._sum -= self._amounts.popleft().amount
        if not self._amounts:
            self._sum = 0.0  # Subtractions leave rounding errors.
