"""The gossip between ingresses: a poll of a model replica says what one ingress holds and learns of the others.

An ingress keeps its side in `IngressGossip`; a model replica keeps a `HeldWorkBoard`, and an `IngressWatch` that
notices when the ingress that asked for a stream is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replicas.protocol import ReplicaStats

DESIRED_REPLICAS = "headway_desired_replicas"
"""What ingresses and model replicas report to Serve's controller: how many model replicas the ingresses ask for."""
MAX_REPORT_AGE_S = 10.0
"""An ingress that has told nothing for this long is no longer counted, seconds."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that wait, and within what time they should be computed."""

    tokens: int
    due_s: float


@dataclass(frozen=True, slots=True)
class HeldWork:
    """What one ingress holds back, and the number of replicas it asks for; ingresses tell each other."""

    ingress_id: str
    work: tuple[Work, ...]
    num_requests: int
    desired_replicas: int


@dataclass(frozen=True, slots=True)
class PollAnswer:
    """What a replica answers a poll."""

    stats: ReplicaStats
    held_elsewhere: tuple[HeldWork, ...]
    """What the other ingresses hold, as they last told."""


@dataclass(slots=True)
class IngressGossip:
    """One ingress's side: what it holds, for all replicas to hear, and what the last poll answered."""

    ingress_id: str
    own: HeldWork | None = None
    """What every poll from now on says of this ingress."""
    polled: Sequence[ReplicaStats] = ()
    """The load of every replica that answered the last poll."""
    elsewhere: Sequence[HeldWork] = ()
    """What the other ingresses hold, as the replicas said in the last poll."""


class HeldWorkBoard:
    """Board on which a model replica keeps what each ingress last told it, for the others and Serve's controller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._told: dict[str, tuple[float, HeldWork]] = {}

    def exchange(self, told: HeldWork | None) -> tuple[HeldWork, ...]:
        """Keep what an ingress tells; gives what the others have told lately."""
        now = self._clock()
        if told is not None:
            self._told[told.ingress_id] = (now, told)
        self._told = {key: entry for key, entry in self._told.items() if now - entry[0] <= MAX_REPORT_AGE_S}
        return tuple(held for _, held in self._told.values() if told is None or held.ingress_id != told.ingress_id)

    def autoscaling_stats(self) -> dict[str, float]:
        """The most replicas that any ingress asks for, for Serve's controller; nothing where none has told lately."""
        desired = [held.desired_replicas for held in self.exchange(None)]
        return {DESIRED_REPLICAS: float(max(desired))} if desired else {}


class IngressWatch:
    """Times at which a model replica last heard of each ingress: Ray (2.60) lets a call outlive its caller.

    Every ingress polls every model replica. One that has not been heard of for `limit_s` while others were is lost.
    Where nobody is heard of, nobody is lost: a replica that is being stopped is polled no more, and its streams
    are to finish.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._limit_s = limit_s
        self._clock = clock
        self._heard_s: dict[str, float] = {}

    def heard_of(self, ingress_id: str) -> None:
        """Note that an ingress is there."""
        now = self._clock()
        self._heard_s[ingress_id] = now
        self._heard_s = {key: heard_s for key, heard_s in self._heard_s.items() if now - heard_s <= self._limit_s}

    def is_lost(self, ingress_id: str) -> bool:
        """Whether nobody waits any more for what an ingress, once heard of, has asked for."""
        return ingress_id not in self._heard_s
