"""Watch over the replicas that serve this ingress's streams: hung replicas and those that leave lose their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from replicas.errors import Overloaded, ReplicaLost, ServingError
from replicas.protocol import ReplicaStats
from replicas.settings import check_bounds, setting
from router.balancing.load_table import InFlight

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
    max_drain_wait_s: float = setting(5.0, ge=0)
    """Longest wait for the streams of a replica that is to leave, seconds. Those that have not ended by then go on at
    once on replicas with free slots and the same weights; the others stay until the replica is stopped."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(slots=True)
class _Watched:
    """State of one replica; durations count only time in which the watch itself ran."""

    heard_s: float
    is_draining: bool = False
    weights_id: str = ""
    silent_since_s: float | None = None
    """Time of the first poll that the replica has not answered; None: it has answered or sent a delta since."""
    silence_s: float = 0.0
    draining_s: float = 0.0


class ReplicaWatch:
    """Watch over replicas: interrupts the streams of hung ones, and of draining ones after a time.

    A replica is silent from a poll until it answers one or sends a delta. It is hung after `max_replica_silence_s` of
    silence, if another replica has answered since its silence began. Without another one its streams stay: it may wake
    up, and its replacement is another one. A slow step is no silence, since polls are answered beside it.

    While this process is stopped or its event loop is blocked, no silence is counted.
    """

    def __init__(self, settings: WatchSettings, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._settings = settings
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._waits: dict[InFlight, asyncio.Timeout | None] = {}
        """Streams, with the time-out of the one wait that each may be in."""
        self._leaving: dict[InFlight, ServingError] = {}
        self._ticked_s = clock()

    def begin(self, in_flight: InFlight) -> None:
        """Watch over the replica of a stream; `end` is called exactly once for it."""
        self._waits[in_flight] = None

    def end(self, in_flight: InFlight) -> None:
        """Forget a stream."""
        del self._waits[in_flight]
        self._leaving.pop(in_flight, None)

    def asked(self) -> None:
        """Note that all replicas are being polled."""
        now = self._clock()
        for watched in self._watched.values():
            if watched.silent_since_s is None:
                watched.silent_since_s, watched.silence_s = now, 0.0

    def heard(self, *reports: ReplicaStats) -> None:
        """Note the answers to a poll, or a delta."""
        now, known = self._clock(), self._watched
        for stats in reports:
            watched = known.get(stats.replica_id)
            if watched is None:
                watched = known[stats.replica_id] = _Watched(now)
            # Kept apart from the reports: a poll of many replicas would else spend its time on freeing earlier ones.
            watched.weights_id = stats.weights_id
            watched.heard_s = now
            watched.silent_since_s = None
            if stats.is_draining:
                watched.is_draining = True
            elif watched.is_draining:
                watched.is_draining, watched.draining_s = False, 0.0

    def is_hung(self, replica_id: str) -> bool:
        """Return True if the replica is silent for too long while another one answers."""
        watched = self._watched.get(replica_id)
        if (
            watched is None
            or watched.silent_since_s is None
            or watched.silence_s < self._settings.max_replica_silence_s
        ):
            return False
        return any(other.heard_s > watched.silent_since_s for other in self._others(watched))

    def tick(self, num_free_slots: int) -> list[str]:
        """Count the time since the last call, and interrupt the streams that leave. Return the hung replicas.

        `num_free_slots` bounds the streams that leave draining replicas now.
        """
        now = self._clock()
        elapsed_s, self._ticked_s = min(now - self._ticked_s, 2 * WATCH_PERIOD_S), now
        for watched in self._watched.values():
            watched.silence_s += elapsed_s
            watched.draining_s += elapsed_s if watched.is_draining else 0.0
        hung = [replica_id for replica_id in self._watched if self.is_hung(replica_id)]
        for in_flight, error in list(self._lost(hung)):
            self._interrupt(in_flight, error)
        for in_flight, error in list(self._drained())[:num_free_slots]:
            self._interrupt(in_flight, error)
        self._forget_gone(now)
        return hung

    def recall(self, in_flights: Iterable[InFlight]) -> None:
        """Interrupt streams that have not begun, so that their requests are placed again as if refused."""
        for in_flight in in_flights:
            if in_flight in self._waits and in_flight not in self._leaving:
                self._interrupt(in_flight, Overloaded("another replica has a free slot", 1.0, "full_replica"))

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

    def _lost(self, hung: list[str]) -> Iterator[tuple[InFlight, ReplicaLost]]:
        for in_flight in self._waits if hung else ():
            if in_flight.replica_id in hung and in_flight not in self._leaving:
                watched = self._watched[in_flight.replica_id]
                # A replica that Serve stops is no longer polled, so its silence may be in order.
                yield (
                    in_flight,
                    ReplicaLost(
                        f"the replica has not answered for {watched.silence_s:.1f} s",
                        has_died=not watched.is_draining,
                    ),
                )

    def _drained(self) -> Iterator[tuple[InFlight, ReplicaLost]]:
        leaving = {replica_id for replica_id, watched in self._watched.items() if self._may_leave(watched)}
        for in_flight in self._waits if leaving else ():
            if in_flight.replica_id in leaving and in_flight not in self._leaving:
                yield in_flight, ReplicaLost("the replica is to leave, so its streams go on elsewhere", has_died=False)

    def _may_leave(self, watched: _Watched) -> bool:
        """Return True if a draining replica's streams should go on elsewhere, with the same weights wherever it is."""
        if not watched.is_draining or watched.draining_s < self._settings.max_drain_wait_s:
            return False
        others = self._others(watched)
        return bool(others) and all(other.weights_id == watched.weights_id for other in others)

    def _others(self, watched: _Watched) -> list[_Watched]:
        """Return the other replicas that take requests and answer."""
        limit_s = self._settings.max_replica_silence_s
        return [
            other
            for other in self._watched.values()
            if other is not watched
            and not other.is_draining
            and (other.silent_since_s is None or other.silence_s < limit_s)
        ]

    def _interrupt(self, in_flight: InFlight, error: ServingError) -> None:
        self._leaving[in_flight] = error
        timeout = self._waits[in_flight]
        if timeout is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())

    def _forget_gone(self, now: float) -> None:
        serving = {in_flight.replica_id for in_flight in self._waits}
        for replica_id, watched in list(self._watched.items()):
            if replica_id not in serving and now - watched.heard_s > _FORGET_AFTER_S:
                del self._watched[replica_id]
