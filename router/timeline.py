"""Timeline of a request: the parts of its time, from its arrival to the end of its answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from replicas.protocol import PhaseSeconds, TokenDelta, Usage
from router.types import Reason

_TOLERANCE_S = 1e-6


class Part(Enum):
    """Part of a request's time; at any moment a request is in exactly one."""

    __hash__ = object.__hash__  # That of an enumeration is a Python function; each delta looks parts up.

    RECEIVED = "received"
    """Arrival and parsing of the body."""
    TOKENIZING = "tokenizing"
    """Chat template, tokenizer and grammar, with the wait for their threads."""
    QUEUED_COLD_START = "queued_cold_start"
    """In the ingress's queue while no replica takes requests."""
    QUEUED_HIGHER_BAND = "queued_higher_band"
    """In the ingress's queue while requests of more urgent bands wait there."""
    QUEUED_FAIRNESS = "queued_fairness"
    """In the ingress's queue while a request of another tenant of the band is the next one."""
    QUEUED_CAPACITY = "queued_capacity"
    """In the ingress's queue while it is the tenant's turn, and no replica has room."""
    QUEUED_REPLICA = "queued_replica"
    """In the replica's queue, before the first step that computed the request."""
    PREFILL = "prefill"
    """From the first step that computed the prompt to the first token."""
    DECODE = "decode"
    """From the first token to the last one."""
    PREEMPTED = "preempted"
    """Without a slot after a preemption."""
    MIGRATED = "migrated"
    """After the last token of a replica that was lost, and the computation of the same tokens on the next one."""
    DELIVERED = "delivered"
    """Way of the first and the last token to the client."""


_NO_SECONDS = dict.fromkeys(Part, 0.0)
QUEUED = (
    Part.QUEUED_COLD_START,
    Part.QUEUED_HIGHER_BAND,
    Part.QUEUED_FAIRNESS,
    Part.QUEUED_CAPACITY,
    Part.QUEUED_REPLICA,
)
"""Parts in which a request waits to be computed."""

Seconds = Mapping[Part, float]


class Wait(Protocol):
    """Wait of a request in flow control."""

    def reasons(self, now: float) -> Seconds:
        """Return the seconds of the wait by their reason, up to now or to the wait's end."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Dispatch of a request to a replica."""

    replica_id: str
    reason: Reason
    after_s: float
    """Time since the request's arrival, seconds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Time of a request between two events that change its part."""

    start_s: float
    end_s: float
    seconds: Seconds
    """Seconds of each part in it; they add up to its length."""
    placement: Placed | None
    """Dispatch to the replica that has the request; None: no replica has it."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of the replicas for a sequence."""

    computed_tokens: int = 0
    """Tokens computed, prompt and output, each as often as it was."""
    recomputed_tokens: int = 0
    """Tokens among these that were computed again, after a preemption or on another replica."""
    device_s: float = 0.0
    """Computing time of the replicas, seconds."""


@dataclass(slots=True)
class Timeline:
    """Timeline of one sequence of a request; its owner tells it each event with the time, monotonic seconds.

    Each event assigns the time since the one before to parts. A replica reports its own phases as durations, so clocks
    of other machines are not compared; what they do not explain of the time until the first token is its way here.

    Invariants: the parts add up to the time from `started_s` to the last event; the intervals follow one another
    without a gap, and their seconds are those of the parts.
    """

    started_s: float
    """Arrival of the request."""
    placements: list[Placed] = field(default_factory=list)
    queued_s: float | None = None
    """Arrival in flow control; None: not yet."""
    first_delta_s: float | None = None
    """Arrival of the first delta; None: there is none yet."""
    finished_s: float | None = None
    """Arrival of the last delta; None: the sequence has not ended well."""
    ended_s: float | None = None
    """End of the answer, or of the request without one; None: it runs."""
    num_output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_migrations: int = 0
    intervals: list[Interval] = field(default_factory=list)
    """Intervals in their order; the one that has not ended is not in it. A token adds none."""
    _seconds: dict[Part, float] = field(default_factory=_NO_SECONDS.copy)
    _mark_s: float = field(init=False)
    _interval_s: float = field(init=False)
    """Start of the present interval."""
    _is_placed: bool = False
    _work_before: Work = Work()
    """Work of the replicas before the present one."""
    _usage: Usage | None = None
    """Usage on the present replica, as last reported."""
    _num_output_before: int = 0
    """Output tokens of the replicas before."""
    _open: Part = Part.RECEIVED
    """Part to which the time since `_mark_s` belongs, as far as is known."""
    _wait: Wait | None = None
    _phases: PhaseSeconds = field(default_factory=PhaseSeconds)
    """Phases on the present replica, as last reported."""
    _num_preempted_before: int = 0

    def __post_init__(self) -> None:
        self._mark_s = self._interval_s = self.started_s

    def fork(self) -> Timeline:
        """Return the timeline of another sequence with the same past."""
        other = Timeline(self.started_s)
        other._seconds, other._mark_s, other._open = dict(self._seconds), self._mark_s, self._open
        other.intervals, other._interval_s = list(self.intervals), self._interval_s
        return other

    def received(self, now: float) -> None:
        """Note that the body has been read and parsed."""
        self._spend(now, Part.TOKENIZING)

    def arrived(self, now: float) -> None:
        """Note that the request has arrived in flow control."""
        self.queued_s = now
        self._spend(now, Part.QUEUED_CAPACITY)

    def waiting(self, wait: Wait) -> None:
        """Note that the request waits for a replica."""
        self._wait = wait

    def waited(self, now: float) -> None:
        """Note that the request no longer waits, placed or not."""
        reasons = {} if self._wait is None else self._wait.reasons(now)
        self._wait = None
        self._spend(now, Part.QUEUED_CAPACITY, reasons)

    def placed(self, now: float, replica_id: str, reason: Reason) -> None:
        """Note that the request was dispatched to a replica."""
        self.placements.append(Placed(replica_id, reason, now - self.started_s))
        self._phases, self._num_preempted_before = PhaseSeconds(), self.num_preemptions
        self._work_before, self._usage, self._num_output_before = self.work(), None, self.num_output_tokens
        self._spend(now, Part.PREFILL)
        self._is_placed = True

    def progressed(self, now: float, delta: TokenDelta, replica_id: str) -> None:
        """Note a delta of the request from its replica, which may be another one than was meant."""
        if self.first_delta_s is None:
            self.first_delta_s, self.cached_tokens = now, delta.usage.cached_tokens
        if self._open is Part.PREFILL:
            if not (delta.token_ids or delta.phases or delta.finish_reason):
                return  # Log probabilities of the prompt come before the first token.
            self._reach(replica_id)
            # The phases explain the time on the replica. The rest is the way of the delta.
            self._open = Part.PREFILL if delta.phases is None else Part.DELIVERED
        self._usage = delta.usage
        self._spend(now, Part.DECODE, self._new_phase_seconds(delta.phases))
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finished_s = now
            self._reopen(Part.DELIVERED)

    def refused(self, now: float) -> None:
        """Note that the replica had no room, so that the request waits again."""
        self.placements.pop()
        self._open, self._is_placed = Part.QUEUED_CAPACITY, False
        self._spend(now, Part.QUEUED_CAPACITY)

    def migrated(self, now: float) -> None:
        """Note that the replica is lost, so that the request waits for another one."""
        self.num_migrations += 1
        self._reopen(Part.MIGRATED)
        self._spend(now, Part.QUEUED_CAPACITY)
        self._is_placed = False

    def ended(self, now: float) -> None:
        """Note the end of the answer."""
        self._spend(now, self._open)
        self._reopen(self._open)
        self.ended_s = now

    def work(self) -> Work:
        """Return the work of all replicas, as far as they have reported it."""
        before, usage = self._work_before, self._usage
        if usage is None:
            return before
        num_recomputed = usage.recomputed_tokens
        if before.computed_tokens:
            # The first step that samples here computes what the replicas before had computed.
            num_new = max(0, self.num_output_tokens - self._num_output_before - 1)
            num_recomputed = max(num_recomputed, usage.computed_tokens - num_new)
        return Work(
            before.computed_tokens + usage.computed_tokens,
            before.recomputed_tokens + num_recomputed,
            before.device_s + usage.device_s,
        )

    def part(self) -> Part | None:
        """Return the part that the request is in; None: it has ended."""
        return None if self.ended_s is not None else self._open

    def seconds(self, now: float) -> Seconds:
        """Return the seconds of each part, up to now or to the end. They add up to `total_s(now)`."""
        if self.ended_s is not None:
            return dict(self._seconds)
        split = {} if self._wait is None else self._wait.reasons(now)
        seconds = dict(self._seconds)
        _add(seconds, max(0.0, now - self._mark_s), self._open, split)
        return seconds

    def total_s(self, now: float) -> float:
        """Return the time from the request's arrival to now or to its end, seconds."""
        return (max(now, self._mark_s) if self.ended_s is None else self.ended_s) - self.started_s

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert all(seconds >= 0 for seconds in self._seconds.values())
        assert abs(sum(self._seconds.values()) - (self._mark_s - self.started_s)) < _TOLERANCE_S
        ends_s = [self.started_s, *(interval.end_s for interval in self.intervals)]
        assert [interval.start_s for interval in self.intervals] == ends_s[:-1] and self._interval_s == ends_s[-1]
        in_intervals: dict[Part, float] = defaultdict(float, {self._open: self._mark_s - self._interval_s})
        for interval in self.intervals:
            assert abs(sum(interval.seconds.values()) - (interval.end_s - interval.start_s)) < _TOLERANCE_S
            for part, seconds in interval.seconds.items():
                in_intervals[part] += seconds
        assert all(abs(in_intervals[part] - self._seconds[part]) < _TOLERANCE_S for part in Part)

    def _reach(self, replica_id: str) -> None:
        """Note the replica that really serves the request."""
        if self.placements[-1].replica_id != replica_id:
            self.placements[-1] = replace(self.placements[-1], replica_id=replica_id)

    def _new_phase_seconds(self, phases: PhaseSeconds | None) -> Seconds:
        """Return what a replica's report adds to the parts."""
        if phases is None:
            return {}
        known, self._phases = self._phases, phases
        self.num_preemptions = self._num_preempted_before + phases.num_preemptions
        is_resumed = self.num_migrations > 0 and self.num_output_tokens > 0
        news = {
            Part.QUEUED_REPLICA: phases.waiting_s - known.waiting_s,
            Part.PREEMPTED: phases.preempted_s - known.preempted_s,
            Part.MIGRATED if is_resumed else Part.PREFILL: phases.prefill_s - known.prefill_s,
        }
        if known.total_s == 0.0:
            news[Part.DECODE] = phases.decode_s
        return news

    def _spend(self, now: float, then: Part, split: Seconds | None = None) -> None:
        """Assign the time since the last event: `split` to its parts, the rest to the open part; open `then`."""
        now = max(now, self._mark_s)
        _add(self._seconds, now - self._mark_s, self._open, split or {})
        if split:
            self._reopen(self._open)
        self._mark_s = now
        if split or then is not self._open:
            self._reopen(then, split)

    def _reopen(self, then: Part, split: Seconds | None = None) -> None:
        """End the present interval at the last event, and open `then`."""
        if self._mark_s > self._interval_s:
            seconds: dict[Part, float] = defaultdict(float)
            _add(seconds, self._mark_s - self._interval_s, self._open, split or {})
            placement = self.placements[-1] if self._is_placed else None
            self.intervals.append(Interval(self._interval_s, self._mark_s, seconds, placement))
            self._interval_s = self._mark_s
        self._open = then


def _add(seconds: dict[Part, float], duration_s: float, rest: Part, split: Seconds) -> None:
    """Add `duration_s`: `split` to its parts, scaled down if it is longer, and what is left to `rest`."""
    if not split:
        seconds[rest] += duration_s
        return
    total_s = sum(split.values())
    scale = duration_s / total_s if total_s > duration_s else 1.0
    for part, part_s in split.items():
        seconds[part] += part_s * scale
    seconds[rest] += max(0.0, duration_s - total_s * scale)


def slowest_of(timelines: Sequence[Timeline]) -> Timeline:
    """Return the timeline of the sequence that ended last, or of one that has not ended."""
    return max(timelines, key=lambda one: float("inf") if one.finished_s is None else one.finished_s)


def queued_s(seconds: Seconds) -> float:
    """Return the time for which a request waited to be computed."""
    return sum(seconds[part] for part in QUEUED)
