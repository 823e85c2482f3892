"""What ingresses hold back, and how they tell each other: by the polls of model replicas that all of them make."""

from __future__ import annotations

from collections.abc import Callable
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


class HeldWorkBoard:
    """Where a model replica keeps what each ingress last told it, for the others and for Serve's controller."""

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
