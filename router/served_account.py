"""Accounts of what requests hold on replicas, and of what tenants are charged for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass

from replicas.protocol import Band, GenerateRequest, ReplicaStats
from router.flow_queue import FlowQueue, Waiting
from router.load_table import InFlight, LoadTable
from router.types import Ranking, RoutingRequest

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


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's place: the replica that has room for it comes first, where it is counted already."""

    ranking: list[str]
    in_flight: InFlight
    expected_tokens: int
    """What its tenant was charged."""
    expected_output_tokens: int
    is_promoted: bool
    """Whether its band had starved: no more urgent request may have its slot."""


class PlacementAccount:
    """Counts each placement on its replica in the load table, and charges its tenant in the queue.

    A tenant is charged what a request is expected to cost when it is dispatched, and the difference when it has
    ended. What replicas computed for requests of other ingresses is charged with each poll.

    Invariant: a band has at most one promoted placement that has not given its first output.
    """

    def __init__(self, queue: FlowQueue, table: LoadTable) -> None:
        self._queue = queue
        self._table = table
        self._served = ServedAccount()
        self._promoted: dict[Band, InFlight] = {}

    def starved_bands(self) -> Set[Band]:
        """Bands that may have a request promoted now: none of theirs still waits for a slot that it was promised."""
        now = self._table.now()
        return {
            band
            for band in Band
            if self._queue.is_starved(band, now) and (band not in self._promoted or self._promoted[band].is_seen)
        }

    def begin(
        self, waiting: Waiting, routing: RoutingRequest, ranking: Ranking, num_prompt_tokens: int, is_promoted: bool
    ) -> Placement:
        """Take a request out of the queue and count it on the first replica of the ranking."""
        request = waiting.request
        num_output_tokens = max(0, routing.expected_output_tokens - len(request.output_token_ids))
        self._queue.dispatch(waiting)
        band = Band.INTERACTIVE if is_promoted else request.band
        in_flight = self._table.begin(ranking.first, band, num_prompt_tokens, num_output_tokens)
        if is_promoted:
            self._promoted[request.band] = in_flight
        return Placement(
            ranking.replica_ids, in_flight, waiting.expected_tokens, routing.expected_output_tokens, is_promoted
        )

    def progressed(self, placement: Placement, request: GenerateRequest, num_tokens: int) -> None:
        """Note output: only now its band is served, since the request may have had to wait on the replica."""
        if not placement.in_flight.is_seen:
            self._queue.served(request.band, self._table.now())
        self._table.progress(placement.in_flight, num_tokens)

    def settle(self, placement: Placement, request: GenerateRequest, num_output_tokens: int) -> None:
        """End a placement and charge what it cost beyond what was expected."""
        self._end(placement)
        cost = len(request.prompt_token_ids) + num_output_tokens
        self._queue.charge(request.band, request.tenant, cost - placement.expected_tokens)
        self._served.charged(placement.in_flight.replica_id, request.band, request.tenant, cost)

    def refused(self, placement: Placement, request: GenerateRequest) -> None:
        """Take back the charge for the prompt, which the replica did not compute; `settle` follows."""
        num_tokens = len(request.prompt_token_ids)
        self._queue.charge(request.band, request.tenant, -num_tokens)
        self._served.charged(placement.in_flight.replica_id, request.band, request.tenant, -num_tokens)

    def withdraw(self, placement: Placement, request: GenerateRequest) -> None:
        """End a placement that nobody will use, at no cost."""
        self._end(placement)
        self._queue.charge(request.band, request.tenant, -placement.expected_tokens)

    def polled(self, stats: list[ReplicaStats]) -> None:
        """Charge what the replicas computed for each tenant beyond what this ingress charged."""
        for (tenant, band), tokens in self._served.corrections(stats).items():
            self._queue.charge(band, tenant, tokens)

    def _end(self, placement: Placement) -> None:
        self._table.end(placement.in_flight)
        for band, in_flight in list(self._promoted.items()):
            if in_flight is placement.in_flight:
                del self._promoted[band]
