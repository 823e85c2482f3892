"""Gossip between ingresses: a poll of a model replica carries one ingress's report and returns those of the others.

An ingress keeps its side in `IngressGossip`. A model replica keeps an `IngressReportBoard`, and an `IngressLiveness`
that detects that the ingress of a stream is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replicas.protocol import ReplicaStats

DESIRED_REPLICAS = "headway_desired_replicas"
"""Name of the metric that Serve's controller gets from ingresses and model replicas: the desired number of replicas."""
MAX_REPORT_AGE_S = 10.0
"""Age at which an ingress's last report no longer counts, seconds."""


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Tokens that wait, and the time in which they should be computed."""

    tokens: int
    due_s: float


@dataclass(frozen=True, slots=True)
class IngressReport:
    """Report of one ingress to the others: its waiting work, the replicas that it asks for, and the keys in use."""

    ingress_id: str
    work: tuple[PendingWork, ...]
    num_requests: int
    desired_replicas: int
    keys: frozenset[str] | None = None
    """API keys with limits that its requests have lately used; None: it answers no clients, as a jobs worker."""


@dataclass(frozen=True, slots=True)
class PollReply:
    """Reply of a replica to a poll."""

    stats: ReplicaStats
    peer_reports: tuple[IngressReport, ...]
    """Last reports of the other ingresses."""


@dataclass(slots=True)
class IngressGossip:
    """One ingress's side of the gossip: its own report for all replicas, and the answers to the last poll."""

    ingress_id: str
    own: IngressReport | None = None
    """Report of this ingress, which every poll carries."""
    polled: Sequence[ReplicaStats] = ()
    """Load of every replica that answered the last poll."""
    peer_reports: Sequence[IngressReport] = ()
    """Reports of the other ingresses, from the answers to the last poll."""
    keys_in_use: Callable[[], frozenset[str] | None] = lambda: None
    """Function that returns the API keys for this ingress's next report."""

    def keys_of_peers(self) -> list[frozenset[str]]:
        """Return the API keys in use, for each other ingress that answers clients."""
        return [report.keys for report in self.peer_reports if report.keys is not None]


class IngressReportBoard:
    """Board of a model replica with the last report of each ingress, for other ingresses and Serve's controller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._reports: dict[str, tuple[float, IngressReport]] = {}

    def publish(self, report: IngressReport | None) -> tuple[IngressReport, ...]:
        """Keep the report of an ingress; return those of the others that are at most `MAX_REPORT_AGE_S` old."""
        now = self._clock()
        if report is not None:
            self._reports[report.ingress_id] = (now, report)
        self._reports = {key: entry for key, entry in self._reports.items() if now - entry[0] <= MAX_REPORT_AGE_S}
        return tuple(
            other for _, other in self._reports.values() if report is None or other.ingress_id != report.ingress_id
        )

    def autoscaling_stats(self) -> dict[str, float]:
        """Return the largest number of replicas that any ingress asks for, for Serve's controller.

        The dict is empty without a report that is at most `MAX_REPORT_AGE_S` old.
        """
        desired = [other.desired_replicas for other in self.publish(None)]
        return {DESIRED_REPLICAS: float(max(desired))} if desired else {}


class IngressLiveness:
    """Detector of lost ingresses in a model replica. Needed because in Ray (2.60) a call can outlive its caller.

    Every ingress polls every model replica. An ingress without a heartbeat for `limit_s` is lost as soon as another
    one has a heartbeat. Without any heartbeat none is lost: a replica that is being stopped is no longer polled, and
    its streams should finish.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._limit_s = limit_s
        self._clock = clock
        self._last_heartbeat_s: dict[str, float] = {}

    def heartbeat(self, ingress_id: str) -> None:
        """Note that an ingress is alive."""
        now = self._clock()
        self._last_heartbeat_s[ingress_id] = now
        self._last_heartbeat_s = {
            key: last_s for key, last_s in self._last_heartbeat_s.items() if now - last_s <= self._limit_s
        }

    def is_lost(self, ingress_id: str) -> bool:
        """Return True if an ingress that has had a heartbeat is lost: its streams have no reader any more."""
        return ingress_id not in self._last_heartbeat_s
