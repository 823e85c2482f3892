"""The gossip between ingresses: a poll of a model replica says what one ingress holds and learns of the others.

An ingress keeps its side in `IngressGossip`; a model replica keeps an `IngressReportBoard`, and an `IngressLiveness`
that notices when the ingress that asked for a stream is gone.
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
class PendingWork:
    """Tokens that wait, and within what time they should be computed."""

    tokens: int
    due_s: float


@dataclass(frozen=True, slots=True)
class IngressReport:
    """What one ingress holds back, and the number of replicas it asks for; ingresses tell each other."""

    ingress_id: str
    work: tuple[PendingWork, ...]
    num_requests: int
    desired_replicas: int


@dataclass(frozen=True, slots=True)
class PollReply:
    """What a replica answers a poll."""

    stats: ReplicaStats
    peer_reports: tuple[IngressReport, ...]
    """What the other ingresses hold, as they last told."""


@dataclass(slots=True)
class IngressGossip:
    """One ingress's side: what it holds, for all replicas to hear, and what the last poll answered."""

    ingress_id: str
    own: IngressReport | None = None
    """What every poll from now on says of this ingress."""
    polled: Sequence[ReplicaStats] = ()
    """The load of every replica that answered the last poll."""
    peer_reports: Sequence[IngressReport] = ()
    """What the other ingresses hold, as the replicas said in the last poll."""


class IngressReportBoard:
    """Board on which a model replica keeps what each ingress last told it, for the others and Serve's controller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._reports: dict[str, tuple[float, IngressReport]] = {}

    def publish(self, report: IngressReport | None) -> tuple[IngressReport, ...]:
        """Keep what an ingress tells; gives what the others have told lately."""
        now = self._clock()
        if report is not None:
            self._reports[report.ingress_id] = (now, report)
        self._reports = {key: entry for key, entry in self._reports.items() if now - entry[0] <= MAX_REPORT_AGE_S}
        return tuple(
            other for _, other in self._reports.values() if report is None or other.ingress_id != report.ingress_id
        )

    def autoscaling_stats(self) -> dict[str, float]:
        """The most replicas that any ingress asks for, for Serve's controller; nothing where none has told lately."""
        desired = [other.desired_replicas for other in self.publish(None)]
        return {DESIRED_REPLICAS: float(max(desired))} if desired else {}


class IngressLiveness:
    """Times at which a model replica last heard of each ingress: Ray (2.60) lets a call outlive its caller.

    Every ingress polls every model replica. One that has not been heard of for `limit_s` while others were is lost.
    Where nobody is heard of, nobody is lost: a replica that is being stopped is polled no more, and its streams
    are to finish.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._limit_s = limit_s
        self._clock = clock
        self._last_heartbeat_s: dict[str, float] = {}

    def heartbeat(self, ingress_id: str) -> None:
        """Note that an ingress is there."""
        now = self._clock()
        self._last_heartbeat_s[ingress_id] = now
        self._last_heartbeat_s = {
            key: last_s for key, last_s in self._last_heartbeat_s.items() if now - last_s <= self._limit_s
        }

    def is_lost(self, ingress_id: str) -> bool:
        """Whether nobody waits any more for what an ingress, once heard of, has asked for."""
        return ingress_id not in self._last_heartbeat_s
