"""What tenants were served on the replicas, through whichever ingress."""

from __future__ import annotations

from collections import defaultdict

from replicas.protocol import Band, ReplicaStats

_Key = tuple[str, Band]


class ServedAccount:
    """Turns the replicas' running totals into corrections of this ingress's own charges.

    An ingress charges a tenant what its own requests cost. The replicas count what they computed for a tenant,
    for all ingresses. The difference is what others asked for, less what the prefix cache saved; charging it too
    makes every ingress order tenants by the same, true account. A long request is reported before it is charged,
    so a correction may be negative later; the sum is right.

    Forgets a replica's totals when it is gone; bounded by the replicas' own bound on tenants.
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[_Key, int]] = {}
        self._own: dict[_Key, int] = defaultdict(int)

    def charged(self, band: Band, tenant: str, tokens: int) -> None:
        """Note what this ingress charged a tenant for a request that has left a replica."""
        self._own[tenant, band] += tokens

    def corrections(self, polled: list[ReplicaStats]) -> dict[_Key, int]:
        """What to charge each tenant and band beyond that, for the time since the last call."""
        served: dict[_Key, int] = defaultdict(int)
        totals: dict[str, dict[_Key, int]] = {}
        for stats in polled:
            known = self._totals.get(stats.replica_id)
            mine = totals[stats.replica_id] = {(t.tenant, t.band): t.tokens for t in stats.served_tokens}
            if known is None:
                continue  # What it did before we knew it is history.
            for key, tokens in mine.items():
                before = known.get(key, 0)
                served[key] += tokens - before if tokens >= before else tokens
        own, self._own = self._own, defaultdict(int)
        self._totals = totals
        return {key: tokens for key in {*served, *own} if (tokens := served[key] - own[key])}
