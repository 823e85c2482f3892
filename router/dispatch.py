"""Takes requests through flow control to replicas, and through the loss of replicas to their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    NoReplicaAvailable,
    Overloaded,
    ReplicaLost,
    RequestQuarantined,
    ServingError,
)
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, TokenDelta
from router.flow_control import FlowController, SampleGroup
from router.served_account import Placement
from router.types import Headroom, ReplicaClient, ReplicaView, RouterObserver

logger = logging.getLogger(__name__)

_MAX_MOVES = 16
_DEATHS_BEFORE_ALONE = 2
_DEADLINE_GRACE_S = 1.0
_MAX_REFUSALS = 1000
"""In a row. Each waits for news of the replica that refused, so this many mean that something is wrong."""


class Journey:
    """What a request has given so far, on all the replicas it has been to."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._num_prompt_logprobs = 0
        self._seen_here = 0
        self.output_token_ids: list[int] = []
        self.is_finished = False
        self.first_s: float | None = None
        self.num_deaths = 0
        self.num_moves = 0
        self.num_refusals = 0

    @property
    def runs_alone(self) -> bool:
        """Whether the next replica must run nothing beside it."""
        return self.num_deaths >= _DEATHS_BEFORE_ALONE

    def next_request(self) -> GenerateRequest:
        """The request for the next replica: it goes on behind what has been given."""
        request = replace(self._request, output_token_ids=tuple(self.output_token_ids), runs_alone=self.runs_alone)
        if self.output_token_ids:
            # The prompt's scores came before the first token.
            request = replace(request, params=replace(request.params, prompt_logprobs=None))
        self._seen_here = 0
        return request

    def take(self, delta: TokenDelta) -> TokenDelta:
        """Note a delta; it comes back without what the client has already, and without an error."""
        repeated = max(0, self._num_prompt_logprobs - self._seen_here)
        self._seen_here += len(delta.prompt_logprobs)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._seen_here)
        self.output_token_ids += delta.token_ids
        self.num_refusals = 0
        if delta.error is not None:
            delta = replace(delta, finish_reason=None, error=None)
        self.is_finished = delta.finish_reason is not None
        return replace(delta, prompt_logprobs=delta.prompt_logprobs[repeated:]) if repeated else delta

    def moved(self, has_died: bool) -> None:
        """Note that a replica was left."""
        self.num_moves += 1
        self.num_deaths += has_died


class Dispatcher:
    """Starts requests when flow control says, keeps the load table true, and owns the slow poll.

    A request survives its replica: what it has already given is sent along to the next one, which goes on behind
    it. Sampling depends on the seed and the index of a token alone, so the client's stream is the one it would
    have been. A request that was there when two replicas died runs alone on the third; if that one dies too, it is
    what kills them, and it is refused for good.

    Invariant: between its dispatch and its end a request is counted exactly once, on the replica that is known or
    expected to serve it.
    """

    def __init__(
        self, client: ReplicaClient, flow: FlowController, observer: RouterObserver,
        poll_period_s: float = 1.0, unix_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`poll_period_s` bounds how long load that came by another ingress stays unknown."""
        self._client = client
        self._flow = flow
        self._table = flow.table
        self._observer = observer
        self._poll_period_s = poll_period_s
        self._unix_clock = unix_clock
        self._learning = asyncio.Lock()

    def start(self, requests: Sequence[GenerateRequest]) -> list[AsyncGenerator[TokenDelta, None]]:
        """One stream of deltas per request. Closing a stream aborts its request.

        A stream raises ServingError where its request fails, so no delta that it yields has an error; a stream
        that ends otherwise ended with a finish reason. Requests with one prompt go to one replica, while it
        has room, so that they share the prompt's blocks.
        """
        groups = {request.prompt_token_ids: SampleGroup() for request in requests}
        return [self._stream(request, groups[request.prompt_token_ids]) for request in requests]

    def headroom(self, band: Band) -> Headroom:
        """What may still wait in a band of this ingress."""
        return self._flow.headroom(band)

    def load(self) -> list[ReplicaView]:
        """What is known of every replica, by id."""
        return self._table.views()

    async def refresh(self) -> None:
        """Ask every replica for its load now.

        Raises:
            ServingError: the poll failed; the table keeps what it knew, and its ages grow.
        """
        asked_s = self._table.now()
        polled = await self._client.poll_stats()
        for replica_id in self._table.replace(polled, asked_s):
            self._flow.forget(replica_id)
        self._flow.polled(polled)

    async def metrics(self) -> list[EngineMetrics]:
        """Everything that every replica's engine counts."""
        return await self._client.poll_metrics()

    async def model_card(self) -> ModelCard:
        """What the replicas serve.

        Raises:
            NoReplicaAvailable: none is ready yet.
        """
        return await self._client.describe()

    async def run(self) -> None:
        """Poll all replicas until cancelled, so that new, idle and foreign load is known too."""
        while True:
            try:
                await self.refresh()
            except ServingError as error:
                logger.warning("load poll failed", extra={"error": str(error)})
            await asyncio.sleep(self._poll_period_s)

    async def _stream(self, request: GenerateRequest, group: SampleGroup) -> AsyncGenerator[TokenDelta, None]:
        journey = Journey(request)
        started_s = self._table.now()
        deadline_s = self._deadline_s(request)
        if not self._table.views():
            await self._learn_replicas()
        # From here until it is in line nothing may be awaited: what is admitted counts only once it waits.
        number = self._flow.admit(request, deadline_s)
        while not journey.is_finished:
            request = journey.next_request()
            placement = await self._flow.acquire(request, number, deadline_s, group)
            try:
                async with aclosing(self._attempt(request, placement, journey, deadline_s)) as deltas:
                    async for delta in deltas:
                        journey.first_s = journey.first_s or self._table.now()
                        if journey.is_finished:
                            self._learn_end(request, journey, started_s)  # Nobody may ask for more.
                        yield delta
            except (Overloaded, NoReplicaAvailable, ReplicaLost, EngineDead) as error:
                if not journey.is_finished:
                    self._move_on(journey, request.request_id, error)

    async def _attempt(
        self, request: GenerateRequest, placement: Placement, journey: Journey, deadline_s: float | None
    ) -> AsyncGenerator[TokenDelta, None]:
        """What one replica gives of a request; ends or raises with the request's stay there."""
        limit_s = None if deadline_s is None else self._loop_time_of(deadline_s + _DEADLINE_GRACE_S)
        num_had = len(journey.output_token_ids)
        try:
            told = replace(
                request,
                expected_output_tokens=placement.expected_output_tokens,
                is_promoted=placement.is_promoted,
            )
            async with aclosing(self._client.generate(told, placement.ranking)) as deltas:
                while (delta := await _next_before(limit_s, deltas)) is not None:
                    self._learn(delta, request, placement)
                    if delta.token_ids or delta.text or delta.prompt_logprobs or delta.error is None:
                        yield journey.take(delta)
                    if delta.error is not None:
                        raise delta.error
            if not journey.is_finished:
                raise ReplicaLost("the replica's stream ended before the sequence did")
        except (Overloaded, NoReplicaAvailable):
            self._flow.refused(placement, request)
            raise
        except (ReplicaLost, EngineDead):
            self._flow.forget(placement.in_flight.replica_id)
            raise
        finally:
            self._flow.settle(placement, request, len(journey.output_token_ids) - num_had)

    def _learn(self, delta: TokenDelta, request: GenerateRequest, placement: Placement) -> None:
        """Take in the load that a delta brings."""
        if delta.stats is not None:
            if delta.stats.replica_id != placement.in_flight.replica_id:
                # The replica that it was meant for did not take it, and gets nothing until it is heard of again.
                self._table.forget(placement.in_flight.replica_id)
                self._table.move(placement.in_flight, delta.stats.replica_id)
            self._flow.progressed(placement, request, len(delta.token_ids))
            self._table.record(delta.stats)
            self._flow.notify()

    def _learn_end(self, request: GenerateRequest, journey: Journey, started_s: float) -> None:
        num_tokens, now = len(journey.output_token_ids), self._table.now()
        self._flow.observe(request, num_tokens)
        ttft_s = None if journey.first_s is None else journey.first_s - started_s
        self._observer.finished(request.band, ttft_s, now - started_s, num_tokens)

    async def _learn_replicas(self) -> None:
        """Fill an empty table, if replicas answer; a request can wait for the first one as well.

        Requests that come together share one poll.
        """
        try:
            async with self._learning:
                if not self._table.views():
                    await self.refresh()
        except ServingError as error:
            logger.warning("load poll failed", extra={"error": str(error)})

    def _move_on(self, journey: Journey, request_id: str, error: ServingError) -> None:
        """Note why a request left a replica; raises where it must not go to another."""
        fields = {"request_id": request_id, "cause": str(error)}
        if isinstance(error, Overloaded | NoReplicaAvailable):
            journey.num_refusals += 1
            if journey.num_refusals > _MAX_REFUSALS:
                raise error
            logger.debug("request comes back from a replica without room", extra=fields)
            return
        journey.moved(has_died=isinstance(error, EngineDead) or (isinstance(error, ReplicaLost) and error.has_died))
        if journey.num_deaths > _DEATHS_BEFORE_ALONE:
            self._observer.migrated("failed")
            raise RequestQuarantined(f"{journey.num_deaths} replicas died while serving the request") from error
        if journey.num_moves > _MAX_MOVES:
            self._observer.migrated("failed")
            raise error
        self._observer.migrated("resumed" if journey.output_token_ids else "restarted")
        logger.warning("request moves to another replica", extra={**fields, "num_deaths": journey.num_deaths})

    def _deadline_s(self, request: GenerateRequest) -> float | None:
        if request.deadline_unix_s is None:
            return None
        return self._table.now() + request.deadline_unix_s - self._unix_clock()

    def _loop_time_of(self, moment_s: float) -> float:
        return asyncio.get_running_loop().time() + moment_s - self._table.now()


async def _next_before(limit_s: float | None, deltas: AsyncGenerator[TokenDelta, None]) -> TokenDelta | None:
    """The next delta; None: there is none.

    The time limit, by the event loop's clock, is one of this wait: a reader that lags is not interrupted while it
    does something else. It lies a little beyond the deadline, which the engine keeps itself.

    Raises:
        DeadlineExceeded: none came in time.
    """
    if limit_s is None:
        return await anext(deltas, None)
    try:
        async with asyncio.timeout_at(limit_s):
            return await anext(deltas, None)
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed and the replica did not answer") from None
