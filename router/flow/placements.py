"""Accounts of the requests placed on replicas, and of the tokens that tenants are charged for them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from replicas.protocol import BANDS, Band, GenerateRequest, ReplicaStats, TenantTokens
from router.balancing.load_table import InFlight, LoadTable, PollChanges
from router.flow.flow_queue import FlowQueue, QueuedRequest
from router.types import Ranking, Reason, RoutingRequest

_Key = tuple[str, Band]
_MAX_MISSED_POLLS = 60


class ServedTokens:
    """Running totals of the tokens that one replica has served each tenant and band, as last reported.

    A report lists the tenants served longest ago first. So reading it from its end costs what has changed: before the
    first entry that is known all are known.
    """

    def __init__(self, reported: Sequence[TenantTokens]) -> None:
        self._totals = OrderedDict(((entry.tenant, entry.band), entry.tokens) for entry in reported)

    def since(self, reported: Sequence[TenantTokens]) -> list[tuple[_Key, int]]:
        """Take in a newer report; return the tokens served since the last one.

        A tenant that the replica had forgotten counts from zero again.
        """
        totals, changes = self._totals, []
        for entry in reversed(reported):
            key, tokens = (entry.tenant, entry.band), entry.tokens
            before = totals.get(key)
            if before == tokens:
                break
            changes.append((key, tokens if before is None or before > tokens else tokens - before))
            totals[key] = tokens
        for key, _ in reversed(changes):
            totals.move_to_end(key)
        # The replica forgets the tenants served longest ago, which come first here too.
        while len(totals) > len(reported):
            totals.popitem(last=False)
        return changes


class UsageReconciler:
    """Reconciler of this ingress's charges with the replicas' running totals.

    An ingress charges a tenant the cost of the requests that it sent. The replicas count what they computed for the
    tenant, for all ingresses. The difference is the cost on other ingresses, less what the prefix cache saved. Charging
    the difference makes every ingress order tenants by the same totals. A long request is reported before it is
    charged, so a later correction may be negative; the sum is right.

    A replica that misses a poll is reconciled at its next one. A replica that misses more than `_MAX_MISSED_POLLS` in
    a row is forgotten, together with the charges recorded for it. Each replica bounds the number of tenants it reports.
    """

    def __init__(self) -> None:
        self._served: dict[str, ServedTokens] = {}
        self._own: dict[str, dict[_Key, int]] = {}
        self._num_missed: dict[str, int] = {}

    def record(self, replica_id: str, band: Band, tenant: str, tokens: int) -> None:
        """Note what this ingress charged a tenant for a request that has left a replica."""
        own = self._own.setdefault(replica_id, {})
        own[tenant, band] = own.get((tenant, band), 0) + tokens

    def corrections(self, changes: PollChanges) -> dict[_Key, int]:
        """Return the tokens to charge each tenant and band beyond the recorded charges, after a poll.

        Its cost grows with the number of replicas that have computed something or have new charges.
        """
        corrections: dict[_Key, int] = defaultdict(int)
        for stats in changes.changed:
            self._correct(stats, corrections)
        self._forget_missing(changes)
        return {key: tokens for key, tokens in corrections.items() if tokens}

    def _correct(self, stats: ReplicaStats, corrections: dict[_Key, int]) -> None:
        known = self._served.get(stats.replica_id)
        own = self._own.pop(stats.replica_id, {})
        if known is None:
            # The first totals are only the baseline.
            self._served[stats.replica_id] = ServedTokens(stats.served_tokens)
            return
        for key, tokens in known.since(stats.served_tokens):
            corrections[key] += tokens
        for key, tokens in own.items():
            corrections[key] -= tokens

    def _forget_missing(self, changes: PollChanges) -> None:
        missing = (changes.left | self._num_missed.keys() | self._own.keys()) - changes.answered
        num_missed = {replica_id: self._num_missed.get(replica_id, 0) + 1 for replica_id in missing}
        for replica_id in [missed for missed, count in num_missed.items() if count > _MAX_MISSED_POLLS]:
            self._served.pop(replica_id, None)
            self._own.pop(replica_id, None)
            del num_missed[replica_id]
        self._num_missed = num_missed


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a request: the ranking of replicas, and its entry in the load table on the first one."""

    ranking: list[str]
    in_flight: InFlight
    expected_tokens: int
    """Tokens that the tenant was charged at dispatch."""
    expected_output_tokens: int
    is_promoted: bool
    """True if the band had starved: no more urgent request may take the request's slot."""
    reason: Reason
    """Reason for the first replica of the ranking."""


class PlacementAccount:
    """Account of placements: counts each one in the load table, and charges its tenant in the queue.

    A tenant is charged the expected cost of a request at its dispatch, and the difference at its end. Tokens that
    replicas computed for other ingresses' requests are charged with each poll.

    Invariant: a band has at most one promoted placement that has not given its first output.
    """

    def __init__(self, queue: FlowQueue, table: LoadTable) -> None:
        self._queue = queue
        self._table = table
        self._served = UsageReconciler()
        self._promoted: dict[Band, InFlight] = {}

    def starved_bands(self) -> Set[Band]:
        """Return the bands that may have a request promoted now: starved, and without an earlier promotion pending."""
        now = self._table.now()
        return {
            band
            for band in BANDS
            if self._queue.is_starved(band, now) and (band not in self._promoted or self._promoted[band].is_seen)
        }

    def begin(
        self,
        queued: QueuedRequest,
        routing: RoutingRequest,
        ranking: Ranking,
        num_prompt_tokens: int,
        is_promoted: bool,
    ) -> Placement:
        """Move a request from the queue to the first replica of the ranking, where it is counted from now on."""
        request = queued.request
        num_output_tokens = max(0, routing.expected_output_tokens - len(request.output_token_ids))
        self._queue.dispatch(queued)
        band = Band.INTERACTIVE if is_promoted else request.band
        in_flight = self._table.begin(ranking.first, band, num_prompt_tokens, num_output_tokens, request.tenant)
        if is_promoted:
            self._promoted[request.band] = in_flight
        return Placement(
            ranking.replica_ids,
            in_flight,
            queued.expected_tokens,
            routing.expected_output_tokens,
            is_promoted,
            ranking.reason,
        )

    def progressed(self, placement: Placement, request: GenerateRequest, num_tokens: int) -> None:
        """Note output. The first output restarts the band's clock; the dispatch does not, as the replica may queue."""
        if not placement.in_flight.is_seen:
            self._queue.served(request.band, self._table.now())
        self._table.progress(placement.in_flight, num_tokens)

    def settle(self, placement: Placement, request: GenerateRequest, num_output_tokens: int) -> None:
        """End a placement and charge the difference between its real and its expected cost."""
        self._end(placement)
        cost = len(request.prompt_token_ids) + num_output_tokens
        self._queue.charge(request.band, request.tenant, cost - placement.expected_tokens)
        self._served.record(placement.in_flight.replica_id, request.band, request.tenant, cost)

    def refused(self, placement: Placement, request: GenerateRequest) -> None:
        """Undo the charge for the prompt, which the replica did not compute. The caller calls `settle` afterwards."""
        num_tokens = len(request.prompt_token_ids)
        self._queue.charge(request.band, request.tenant, -num_tokens)
        self._served.record(placement.in_flight.replica_id, request.band, request.tenant, -num_tokens)

    def withdraw(self, placement: Placement, request: GenerateRequest) -> None:
        """End a placement that will not be used, and undo its charge."""
        self._end(placement)
        self._queue.charge(request.band, request.tenant, -placement.expected_tokens)

    def polled(self, changes: PollChanges) -> None:
        """Charge each tenant the tokens that the replicas computed beyond this ingress's charges."""
        self._queue.charge_all(self._served.corrections(changes))

    def _end(self, placement: Placement) -> None:
        self._table.end(placement.in_flight)
        for band, in_flight in list(self._promoted.items()):
            if in_flight is placement.in_flight:
                del self._promoted[band]
