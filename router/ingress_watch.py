"""Whether the ingress that asked for a stream is still there: Ray (2.60) lets a call outlive its caller."""

from __future__ import annotations

from collections.abc import Callable


class IngressWatch:
    """Where a model replica keeps when it last heard of each ingress.

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
