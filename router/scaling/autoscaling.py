"""Autoscaler: decides the number of model replicas. Pure: the standard library only, and time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median_low

from replicas.settings import check_bounds, setting
from replicas.timing.rates import SlidingRate
from router.scaling.ingress_reports import PendingWork

_FILL = 0.85
"""Share of its measured speed and of its slots at which a replica counts as full when replicas are given back."""
_FILLING = 0.5
"""Share of all slots in use from which on the rate of arriving work counts."""
_MAX_EXCESS = 1.5
"""Limit on the replicas that waiting urgent work asks for, as a multiple of those that the arriving work needs."""
_GROWTH_WINDOW_S = 3.0


@dataclass(frozen=True, slots=True)
class DownscaleDelay:
    """Delays before model replicas are given back, seconds."""

    to_fewer_s: float = 60.0
    """Time for which fewer replicas must have been enough."""
    to_zero_s: float = 300.0
    """Time without any request before the last replica is given back, if longer than `to_fewer_s`."""

    def __post_init__(self) -> None:
        for name, delay_s in (("to_fewer_s", self.to_fewer_s), ("to_zero_s", self.to_zero_s)):
            if not delay_s >= 0:
                raise ValueError(f"downscale_delay_s: {name} is {delay_s:g}; it must be at least 0")

    def __str__(self) -> str:
        return f"{self.to_fewer_s:.10g}/{self.to_zero_s:.10g}"


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Bounds on the number of model replicas."""

    min_replicas: int
    max_replicas: int
    num_replicas: int
    """Replicas to start with."""

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.num_replicas <= self.max_replicas:
            raise ValueError(
                f"num_replicas ({self.num_replicas}), to start with, must be at least min_replicas "
                f"({self.min_replicas}) and at most max_replicas ({self.max_replicas})"
            )


@dataclass(frozen=True, slots=True)
class AutoscalingSettings:
    """Speed of the change in the number of model replicas; cross-field rules raise on construction."""

    target_drain_s: float = setting(2.0, gt=0)
    """Target for the time until all waiting work except batch work is done, seconds; replicas are added to meet it."""
    batch_drain_s: float = setting(86_400.0, gt=0)
    """The same target for batch work without a deadline, seconds. Batch work with a deadline is due before it."""
    downscale_delay_s: DownscaleDelay = setting(DownscaleDelay())
    """Seconds for which fewer replicas must have been enough before the others are given back. The second number, which
    may be omitted, is that of the last replica: seconds without any request, if longer; it needs `min_replicas=0`."""
    replica_tokens_per_s: float = setting(1000.0, gt=0)
    """Assumed speed of a replica, prompt and output tokens per second, until one has been measured under load."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.batch_drain_s < self.target_drain_s:
            raise ValueError(
                f"batch_drain_s ({self.batch_drain_s:g}) must be at least target_drain_s ({self.target_drain_s:g})"
            )


@dataclass(frozen=True, slots=True)
class ScalingInputs:
    """Inputs of a decision on the number of replicas, at one moment."""

    num_replicas: int
    """Replicas that serve now; those that drain are not counted."""
    num_requests: int
    """Requests that wait or run, in all ingresses and replicas."""
    work: tuple[PendingWork, ...]
    """Work that waits, in all ingresses and replicas."""
    saturated_tokens_per_s: tuple[float, ...]
    """Measured speed under load of each replica that has one."""
    served_tokens_per_s: float
    """Tokens per second that all replicas together have lately computed, without batch work."""
    num_running: int = 0
    """Running requests, without batch work."""
    num_slots: int = 1
    """Slots of one replica."""
    outstanding_tokens: int = 0
    """Tokens that all requests but batch work, waiting or running anywhere, are expected to need still."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Decision on the number of replicas, with its inputs."""

    desired_replicas: int
    needed_replicas: int
    """Number of replicas that the load of this moment alone needs."""
    replica_tokens_per_s: float
    drain_s: float | None
    """Seconds until the present replicas have computed all waiting work but batch work; None: work but no replica."""
    inputs: ScalingInputs


def urgent_tokens(work: Iterable[PendingWork], settings: AutoscalingSettings) -> int:
    """Return the tokens of the work that is due within `target_drain_s`."""
    return sum(waiting.tokens for waiting in work if waiting.due_s <= settings.target_drain_s)


class Autoscaler:
    """Autoscaler: decides the number of model replicas from the work that waits and runs.

    Urgent work is all work but batch work.

    1. A replica's speed is the lower median of the measured speeds of saturated steps. If no replica has a measured
       speed, it is the last known one; before the first, `replica_tokens_per_s`.
    2. Waiting work is due in `target_drain_s`. Batch work is due in 0.8 of the time to its deadline, or in
       `batch_drain_s` if it has none.
    3. Needed for waiting work: for each time at which some of it is due, all tokens due until then, divided by the
       time left and by a replica's speed; the largest of these, rounded up. If all work is urgent, that is
       tokens / (speed x target). Running requests do not count: more replicas would not help them.
       The arrival rate is the tokens computed per second plus the growth per second, over the last 3 s, of the urgent
       work that waits or runs. Once half of all slots run urgent work, the replicas must keep up with that rate.
       Beyond the number decided last, urgent work asks for at most 1.5 times the replicas that keep up with it at 0.85
       of their speed: work that gathers while new replicas start asks for no more of them.
    4. Needed for running urgent work: tokens computed per second over the last 3 s or 10 s, the larger, divided by
       0.85 of a replica's speed; and running requests, divided by 0.85 of its slots; the larger, rounded up. This keeps
       replicas and never adds any: it is limited to the present number and to the number decided last.
    5. At least one replica is needed while any request exists, and after the last one until the delay to zero has
       passed, the delay of 8. included.
    6. Before any replica was seen, at least `num_replicas` are needed: an ingress learns from them which model is
       served.
    7. The number is kept within `min_replicas` and `max_replicas`.
    8. The decision is the largest number needed at any moment of the last `downscale_delay_s`. So replicas are added
       at once, and given back only after fewer were enough for that time. The replicas found first count as needed at
       that moment, so that a new ingress gives none back early.
    """

    def __init__(self, settings: AutoscalingSettings, bounds: ReplicaBounds, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self.settings = settings
        self.bounds = bounds
        """Bounds; the owner may replace them between two decisions."""
        self._clock = clock
        self._speed = settings.replica_tokens_per_s
        self._has_seen_replicas = False
        self._busy_s = clock()
        self._growth = SlidingRate(_GROWTH_WINDOW_S)
        self._outstanding_tokens = 0
        self._decided_s = clock()
        self._needs: deque[tuple[float, int]] = deque()
        """Pairs (time, number needed) in order of time, with falling numbers.

        An earlier number that is not larger can never be the largest again.
        """

    def decide(self, inputs: ScalingInputs) -> ScalingDecision:
        """Decide the number of replicas from the load of this moment and of the time before it."""
        now = self._clock()
        self._learn(inputs, now)
        needed = self._needed(inputs, now)
        self._remember(needed, now)
        return ScalingDecision(self._needs[0][1], needed, self._speed, self._drain_s(inputs), inputs)

    def _learn(self, inputs: ScalingInputs, now: float) -> None:
        if inputs.saturated_tokens_per_s:
            self._speed = median_low(inputs.saturated_tokens_per_s)
        if inputs.num_requests:
            self._busy_s = now
        if inputs.num_replicas and not self._has_seen_replicas:
            self._has_seen_replicas = True
            self._busy_s = now
            self._remember(self._bounded(inputs.num_replicas), now)

    def _needed(self, inputs: ScalingInputs, now: float) -> int:
        if not self._has_seen_replicas:
            return self._bounded(max(self.bounds.num_replicas, self._for_waiting(inputs, now, decided=0)))
        decided = self._needs[0][1]
        num_kept = min(self._for_running(inputs), inputs.num_replicas, decided)
        needed = max(self._for_waiting(inputs, now, decided), num_kept)
        delay = self.settings.downscale_delay_s
        if now - self._busy_s <= max(0.0, delay.to_zero_s - delay.to_fewer_s):
            needed = max(needed, 1)
        return self._bounded(needed)

    def _for_waiting(self, inputs: ScalingInputs, now: float, decided: int) -> int:
        tokens = urgent_tokens(inputs.work, self.settings)
        arriving_per_s = self._arriving_tokens_per_s(inputs, now)
        most_per_s = max(decided * self._speed, _MAX_EXCESS * arriving_per_s / _FILL)
        tokens_per_s = min(tokens / self.settings.target_drain_s, most_per_s)
        if inputs.num_running >= _FILLING * inputs.num_slots * inputs.num_replicas:
            tokens_per_s = max(tokens_per_s, arriving_per_s)
        for work in sorted(inputs.work, key=lambda work: work.due_s):
            if work.due_s > self.settings.target_drain_s:
                tokens += work.tokens
                tokens_per_s = max(tokens_per_s, tokens / work.due_s)
        return math.ceil(tokens_per_s / self._speed)

    def _arriving_tokens_per_s(self, inputs: ScalingInputs, now: float) -> float:
        grown_by = inputs.outstanding_tokens - self._outstanding_tokens
        self._growth.add(grown_by, now, now - self._decided_s)
        self._outstanding_tokens, self._decided_s = inputs.outstanding_tokens, now
        return max(0.0, inputs.served_tokens_per_s + self._growth.per_s(now))

    def _for_running(self, inputs: ScalingInputs) -> int:
        by_tokens = inputs.served_tokens_per_s / (_FILL * self._speed)
        by_slots = inputs.num_running / (_FILL * inputs.num_slots)
        return math.ceil(max(by_tokens, by_slots))

    def _remember(self, needed: int, now: float) -> None:
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((now, needed))
        while now - self._needs[0][0] > self.settings.downscale_delay_s.to_fewer_s:
            self._needs.popleft()

    def _bounded(self, number: int) -> int:
        return min(self.bounds.max_replicas, max(self.bounds.min_replicas, number))

    def _drain_s(self, inputs: ScalingInputs) -> float | None:
        tokens = urgent_tokens(inputs.work, self.settings)
        if tokens == 0:
            return 0.0
        return tokens / (inputs.num_replicas * self._speed) if inputs.num_replicas else None
