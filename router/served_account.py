"""What tenants were served on the replicas, through whichever ingress."""

from __future__ import annotations

from collections import defaultdict

from replicas.protocol import Band, ReplicaStats

_Key = tuple[str, Band]
_MAX_MISSED_POLLS = 60


class ServedAccount:
    """Turns the replicas' running totals into corrections of this ingress's own charges.

    An ingress charges a tenant what its own requests cost. The replicas count what they computed for a tenant,
    for all ingresses. The difference is what others asked for, less what the prefix cache saved; charging it too
    makes every ingress order tenants by the same, true account. A long request is reported before it is charged,
    so a correction may be negative later; the sum is right.

    A replica that misses a poll is settled when it is back. One that stays away is forgotten, with what we charged
    for it; the replicas' own bound on tenants bounds the rest.
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[_Key, int]] = {}
        self._own: dict[str, dict[_Key, int]] = {}
        self._num_missed: dict[str, int] = {}

    def charged(self, replica_id: str, band: Band, tenant: str, tokens: int) -> None:
        """Note what this ingress charged a tenant for a request that has left a replica."""
        own = self._own.setdefault(replica_id, {})
        own[tenant, band] = own.get((tenant, band), 0) + tokens

    def corrections(self, polled: list[ReplicaStats]) -> dict[_Key, int]:
        """What to charge each tenant and band beyond that, for the time since the last call."""
        corrections: dict[_Key, int] = defaultdict(int)
        for stats in polled:
            known = self._totals.get(stats.replica_id)
            mine = self._totals[stats.replica_id] = {(t.tenant, t.band): t.tokens for t in stats.served_tokens}
            own = self._own.pop(stats.replica_id, {})
            if known is None:
                continue  # What it did before we knew it is history.
            for key in {*mine, *own}:
                before, after = known.get(key, 0), mine.get(key, 0)
                corrections[key] += (after - before if after >= before else after) - own.get(key, 0)
        self._forget_missing({stats.replica_id for stats in polled})
        return {key: tokens for key, tokens in corrections.items() if tokens}

    def _forget_missing(self, answered: set[str]) -> None:
        missing = {*self._totals, *self._own} - answered
        self._num_missed = {replica_id: self._num_missed.get(replica_id, 0) + 1 for replica_id in missing}
        for replica_id, num_missed in self._num_missed.items():
            if num_missed > _MAX_MISSED_POLLS:
                self._totals.pop(replica_id, None)
                self._own.pop(replica_id, None)
