"""Watch over the replicas that serve this ingress's streams: hung replicas and those that leave lose their streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from replicas.errors import Overloaded, ReplicaLost, ServingError
from replicas.protocol import ReplicaStats
from replicas.settings import check_bounds, setting
from router.balancing.load_table import InFlight, PollChanges

WATCH_PERIOD_S = 0.25
_FORGET_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Settings of the polls of replicas, and of the streams that leave a replica before their end."""

    poll_period_s: float = 1.0
    """Seconds between two polls; bounds the time for which load from another ingress stays unknown."""
    max_replica_silence_s: float = setting(5.0, gt=0)
    """Longest silence of a replica with streams, seconds: it neither answers polls nor sends tokens. Then its streams
    go on elsewhere, if another replica answers."""
    max_drain_wait_s: float = 5.0
    """Longest wait for the streams of a replica that is to leave, seconds. Those that have not ended by then go on at
    once on replicas with free slots and the same weights; the others stay until the replica is stopped."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class _Poll:
    """A poll of all replicas."""

    number: int
    ran_s: float
    """Time that the watch had run."""


@dataclass(slots=True)
class _Watched:
    """State of one replica; durations count only time in which the watch itself ran."""

    weights_id: str
    num_polls: int
    """Number of polls that had begun when the replica was last heard of, but for its answer to the last poll."""
    draining_since_s: float | None = None
    """Time that the watch had run when the replica began to drain; None: it takes requests."""


class ReplicaWatch:
    """Watch over replicas: interrupts the streams of hung ones, and of draining ones after a time.

    A replica is silent from a poll until it answers one or sends a delta. It is hung after `max_replica_silence_s` of
    silence, if another replica has answered since its silence began. Without another one its streams stay: it may wake
    up, and its replacement is another one. A slow step is no silence, since polls are answered beside it.

    A killed replica is not noticed here: its channel breaks, which fails its streams at once (`ChannelPool`).

    While this process is stopped or its event loop is blocked, no silence is counted.

    A poll costs what it changes: the answers of all replicas are kept as one set.
    """

    def __init__(self, settings: WatchSettings, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._settings = settings
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._polls: deque[_Poll] = deque()
        """Polls that a replica's silence may have begun with, the oldest first."""
        self._num_begun = 0
        self._answered: Set[str] = frozenset()
        """Replicas that answered the last poll with answers."""
        self._num_answered = 0
        """Number of polls that had begun then."""
        self._waits: dict[InFlight, asyncio.Timeout | None] = {}
        """Streams, with the time-out of the one wait that each may be in."""
        self._leaving: dict[InFlight, ServingError] = {}
        self._ticked_s = clock()
        self._ran_s = 0.0

    def begin(self, in_flight: InFlight) -> None:
        """Watch over the replica of a stream; `end` is called exactly once for it."""
        self._waits[in_flight] = None

    def end(self, in_flight: InFlight) -> None:
        """Forget a stream."""
        del self._waits[in_flight]
        self._leaving.pop(in_flight, None)

    def asked(self) -> None:
        """Note that all replicas are being polled."""
        self._polls.append(_Poll(self._num_begun, self._ran_s))
        self._num_begun += 1
        longest_s = max(_FORGET_AFTER_S, self._settings.max_replica_silence_s)
        while len(self._polls) > 1 and self._polls[1].ran_s < self._ran_s - longest_s:
            self._polls.popleft()

    def polled(self, polled: Iterable[ReplicaStats], changes: PollChanges) -> None:
        """Note the answers to a poll, and what they changed in the load table."""
        for replica_id in changes.left & self._watched.keys():
            self._watched[replica_id].num_polls = self._num_polls(replica_id)
        self._answered, self._num_answered = changes.answered, self._num_begun
        for stats in changes.changed:
            self.heard(stats)
        # A replica that was heard of in another way may not be a change of the table.
        if changes.joined - self._watched.keys():
            for stats in polled:
                self.heard(stats)

    def heard(self, stats: ReplicaStats) -> None:
        """Note a report of a replica."""
        watched = self._watched.get(stats.replica_id)
        if watched is None:
            watched = self._watched[stats.replica_id] = _Watched(stats.weights_id, self._num_begun)
        watched.num_polls = self._num_begun
        if not stats.is_draining:
            watched.draining_since_s = None
        elif watched.draining_since_s is None:
            watched.draining_since_s = self._ran_s

    def is_hung(self, replica_id: str) -> bool:
        """Return True if the replica is silent for too long while another one answers."""
        if replica_id not in self._watched or self._silence_s(replica_id) < self._settings.max_replica_silence_s:
            return False
        num_polls = self._num_polls(replica_id)
        return any(self._num_polls(other_id) > num_polls for other_id in self._others(replica_id))

    def tick(self, num_free_slots: int) -> list[str]:
        """Count the time since the last call, and interrupt the streams that leave. Return the hung replicas.

        `num_free_slots` bounds the streams that leave draining replicas now.
        """
        now = self._clock()
        self._ran_s += min(now - self._ticked_s, 2 * WATCH_PERIOD_S)
        self._ticked_s = now
        hung = [replica_id for replica_id in self._watched if self.is_hung(replica_id)]
        for in_flight, error in list(self._lost(hung)):
            self._interrupt(in_flight, error)
        for in_flight, error in list(self._drained())[:num_free_slots]:
            self._interrupt(in_flight, error)
        self._forget_gone()
        return hung

    def recall(self, in_flights: Iterable[InFlight]) -> None:
        """Interrupt streams that have not begun, so that their requests are placed again as if refused."""
        for in_flight in in_flights:
            if in_flight in self._waits and in_flight not in self._leaving:
                message = "the replica is full, and another one has a free slot"
                self._interrupt(in_flight, Overloaded(message, 1.0, "full_replica"))

    def within(self, in_flight: InFlight, limit_s: float | None) -> asyncio.Timeout:
        """Return the time-out of a stream's next wait; `limit_s` is a time of the event loop's clock.

        Raises:
            ServingError: the stream leaves its replica.
        """
        self.check(in_flight)
        timeout = self._waits[in_flight] = asyncio.timeout_at(limit_s)
        return timeout

    def waited(self, in_flight: InFlight) -> None:
        """Note that a stream's wait has ended."""
        self._waits[in_flight] = None

    def check(self, in_flight: InFlight) -> None:
        """Raise the reason if the stream leaves its replica."""
        if in_flight in self._leaving:
            raise self._leaving[in_flight]

    def _num_polls(self, replica_id: str) -> int:
        """Return the number of polls that had begun when the replica was last heard of."""
        num_polls = self._watched[replica_id].num_polls
        return max(num_polls, self._num_answered) if replica_id in self._answered else num_polls

    def _silence_s(self, replica_id: str) -> float:
        """Return the time since the first poll that the replica has not answered; 0: it has answered the last one."""
        num_polls = self._num_polls(replica_id)
        if num_polls >= self._num_begun:
            return 0.0
        return self._ran_s - self._polls[max(0, num_polls - self._polls[0].number)].ran_s

    def _lost(self, hung: list[str]) -> Iterator[tuple[InFlight, ReplicaLost]]:
        for in_flight in self._waits if hung else ():
            if in_flight.replica_id in hung and in_flight not in self._leaving:
                # A replica that Serve stops is no longer polled, so its silence may be in order.
                yield (
                    in_flight,
                    ReplicaLost(
                        f"the replica has not answered for {self._silence_s(in_flight.replica_id):.1f} s",
                        has_died=self._watched[in_flight.replica_id].draining_since_s is None,
                    ),
                )

    def _drained(self) -> Iterator[tuple[InFlight, ReplicaLost]]:
        leaving = {replica_id for replica_id, watched in self._watched.items() if self._may_leave(replica_id, watched)}
        for in_flight in self._waits if leaving else ():
            if in_flight.replica_id in leaving and in_flight not in self._leaving:
                yield in_flight, ReplicaLost("the replica is to leave, so its streams go on elsewhere", has_died=False)

    def _may_leave(self, replica_id: str, watched: _Watched) -> bool:
        """Return True if a draining replica's streams should go on elsewhere, with the same weights wherever it is."""
        since_s = watched.draining_since_s
        if since_s is None or self._ran_s - since_s < self._settings.max_drain_wait_s:
            return False
        others = self._others(replica_id)
        return bool(others) and all(self._watched[other_id].weights_id == watched.weights_id for other_id in others)

    def _others(self, replica_id: str) -> list[str]:
        """Return the other replicas that take requests and answer."""
        limit_s = self._settings.max_replica_silence_s
        return [
            other_id
            for other_id, other in self._watched.items()
            if other_id != replica_id and other.draining_since_s is None and self._silence_s(other_id) < limit_s
        ]

    def _interrupt(self, in_flight: InFlight, error: ServingError) -> None:
        self._leaving[in_flight] = error
        timeout = self._waits[in_flight]
        if timeout is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())

    def _forget_gone(self) -> None:
        serving = {in_flight.replica_id for in_flight in self._waits}
        for replica_id in [known for known in self._watched if self._silence_s(known) > _FORGET_AFTER_S]:
            # One that answered the last poll with answers may be alive, and its next answer may change nothing.
            if replica_id not in serving and replica_id not in self._answered:
                del self._watched[replica_id]
