"""Dispatch of requests through flow control to replicas, and their migration when a replica is lost."""

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
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta
from router.flow.flow_control import FlowController, SampleGroup, SequenceSet
from router.flow.flow_queue import BandQueueSize
from router.flow.placements import Placement
from router.timeline import Timeline
from router.types import Headroom, ReplicaClient, ReplicaView, RouterObserver
from router.watch import WATCH_PERIOD_S, ReplicaWatch, WatchSettings

logger = logging.getLogger(__name__)

MAX_OPEN_STREAMS = 256
"""Most streams of one request that are read at a time."""
_MAX_MIGRATIONS = 16
_DEATHS_BEFORE_ALONE = 2
_DEADLINE_GRACE_S = 1.0
_MAX_REFUSALS = 1000
"""Most refusals of one request in a row. After each, the request waits for a new report of the replica that refused,
so this many mean a fault."""


class ResumableRequest:
    """State of a request across replicas: the output so far, and the replicas lost."""

    def __init__(self, request: GenerateRequest, timeline: Timeline) -> None:
        self._request = request
        self.timeline = timeline
        self._num_prompt_logprobs = 0
        self._num_seen_here = 0
        self.output_token_ids = list(request.output_token_ids)
        self.is_finished = False
        self.num_deaths = 0
        self.num_migrations = 0
        self.num_refusals = 0

    @property
    def is_isolated(self) -> bool:
        """True if the next replica must run the request alone."""
        return self.num_deaths >= _DEATHS_BEFORE_ALONE

    def to_resume(self) -> GenerateRequest:
        """Return the request for the next replica, which continues behind the output so far."""
        self._num_seen_here = 0
        if not (self.output_token_ids or self.is_isolated):
            return self._request
        request = replace(self._request, output_token_ids=tuple(self.output_token_ids), is_isolated=self.is_isolated)
        if self.output_token_ids:
            # The prompt's log probabilities came before the first token.
            request = replace(request, params=replace(request.params, prompt_logprobs=None))
        return request

    def record(self, delta: TokenDelta, now: float, replica_id: str) -> TokenDelta:
        """Note a delta of a replica; return it without its error and without what the client has already.

        The client may have prompt log probabilities that another replica computed.
        """
        repeated = max(0, self._num_prompt_logprobs - self._num_seen_here)
        self._num_seen_here += len(delta.prompt_logprobs)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._num_seen_here)
        self.output_token_ids += delta.token_ids
        self.num_refusals = 0
        if delta.error is not None:
            delta = delta._replace(finish_reason=None, error=None)
        self.is_finished = delta.finish_reason is not None
        self.timeline.progressed(now, delta, replica_id)
        return delta._replace(prompt_logprobs=delta.prompt_logprobs[repeated:]) if repeated else delta

    def record_migration(self, has_died: bool, now: float) -> None:
        """Note that the request left a replica; `has_died` says that the replica died."""
        self.timeline.migrated(now)
        self.num_migrations += 1
        if has_died:
            self.num_deaths += 1


class Dispatcher:
    """Dispatcher of one ingress: sends requests to replicas, updates the load table and polls the replicas.

    A request survives the loss of its replica. The next replica gets the output so far and continues behind it.
    Sampling depends only on the seed and the index of a token, so the client's stream is the same as without the loss.
    A request that was on two replicas when they died runs alone on the third. If the third dies too, the request is
    taken for the cause and refused for good.

    Invariant: between its dispatch and its end a request is counted exactly once, on the replica that is known or
    expected to serve it.
    """

    def __init__(
        self, client: ReplicaClient, flow: FlowController, observer: RouterObserver,
        settings: WatchSettings | None = None, unix_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`settings`: None for the defaults."""
        settings = settings or WatchSettings()
        self._client = client
        self._flow = flow
        self._table = flow.table
        self._observer = observer
        self._poll_period_s = settings.poll_period_s
        self._watch = ReplicaWatch(settings, self._table.now)
        self._unix_clock = unix_clock
        self._learning = asyncio.Lock()

    def streams(
        self, requests: Sequence[GenerateRequest], timelines: Sequence[Timeline] = ()
    ) -> list[AsyncGenerator[TokenDelta, None]]:
        """Return one stream of deltas per request. The first read of a stream starts its request, closing it aborts it.

        Nothing is sent, queued or counted before that read. `timelines` get the events of their requests, one for each;
        empty: the caller does not want any.

        A stream raises ServingError if its request fails, so no delta that it yields has an error. Every other stream
        ends with a finish reason. Requests with the same prompt go to one replica while that replica has room, so that
        they share the prompt's blocks. At most `MAX_OPEN_STREAMS` are read at a time.
        """
        groups = {request.prompt_token_ids: SampleGroup() for request in requests}
        timelines = timelines or [Timeline(self._table.now()) for _ in requests]
        whole = SequenceSet(requests[:MAX_OPEN_STREAMS])
        return [
            self._stream(request, groups[request.prompt_token_ids], timeline, whole)
            for request, timeline in zip(requests, timelines, strict=True)
        ]

    def headroom(self, band: Band, tenant: str) -> Headroom:
        """Return a tenant's limits in a band's queue in this ingress, and their present use."""
        return self._flow.admission.headroom(band, tenant)

    def waiting(self, band: Band, most: int) -> BandQueueSize:
        """Return the size of a band's queue, with the `most` tenants that have most requests in it."""
        return self._flow.queue.size(band, most)

    def load(self) -> list[ReplicaView]:
        """Return the known load of every replica, sorted by id."""
        return self._table.views()

    async def refresh(self) -> None:
        """Ask every replica for its load now.

        Raises:
            ServingError: the poll failed; the table keeps what it knew, and its ages grow.
        """
        asked_s = self._table.now()
        self._watch.asked()
        polled = await self._client.poll_stats()
        changes = self._table.replace(polled, asked_s)
        self._watch.polled(polled, changes)
        for replica_id in changes.gone:
            self._flow.forget(replica_id)
        self._flow.polled(changes)

    async def metrics(self) -> list[EngineMetrics]:
        """Return everything that every replica's engine counts."""
        return await self._client.poll_metrics()

    async def drain(self, replica_id: str) -> bool:
        """Have a replica refuse new requests and hand over its streams; return False if there is no such replica.

        Raises:
            ServingError: the replica did not answer.
        """
        if replica_id not in self._table:
            await self._try_refresh()
        if replica_id not in self._table or not await self._client.drain(replica_id):
            return False
        await self._try_refresh()
        return True

    async def model_card(self) -> ModelCard:
        """Return the description of the model that the replicas serve.

        Raises:
            NoReplicaAvailable: no replica is ready yet.
        """
        return await self._client.describe()

    async def run(self) -> None:
        """Poll and watch over all replicas until cancelled.

        Polls tell of new replicas, idle ones and other ingresses' load. Streams leave hung and draining replicas.
        Requests that wait on a full replica leave it for a free slot elsewhere.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll())
            tasks.create_task(self._move_streams())

    async def _poll(self) -> None:
        while True:
            await self._try_refresh()
            await asyncio.sleep(self._poll_period_s)

    async def _move_streams(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            for replica_id in self._watch.tick(self._table.cluster().num_free_slots):
                self._flow.forget(replica_id)
            self._watch.recall(self._flow.to_rebalance())

    async def _try_refresh(self) -> None:
        try:
            await self.refresh()
        except ServingError as error:
            logger.warning("load poll failed", extra={"error": str(error)})

    async def _stream(
        self, request: GenerateRequest, group: SampleGroup, timeline: Timeline, whole: SequenceSet
    ) -> AsyncGenerator[TokenDelta, None]:
        resumable = ResumableRequest(request, timeline)
        timeline.arrived(self._table.now())
        deadline_s = self._deadline_s(request)
        if not len(self._table):
            await self._learn_replicas()
        # No `await` between here and the queue: an admitted request counts against the limits only once it is queued.
        arrival_index = self._flow.admit(request, deadline_s, whole)
        while not resumable.is_finished:
            request = resumable.to_resume()
            placement = await self._flow.acquire(request, arrival_index, deadline_s, group, timeline)
            try:
                async with aclosing(self._attempt(request, placement, resumable, deadline_s)) as deltas:
                    async for delta in deltas:
                        if resumable.is_finished:
                            self._learn_end(request, timeline, delta.stats)  # The reader may stop after this delta.
                        yield delta
            except (Overloaded, NoReplicaAvailable, ReplicaLost, EngineDead) as error:
                if not resumable.is_finished:
                    self._leave_replica(resumable, request.request_id, error)

    async def _attempt(
        self, request: GenerateRequest, placement: Placement, resumable: ResumableRequest, deadline_s: float | None
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield what one replica generates of a request, until the request ends there or leaves that replica.

        Raises:
            ServingError: the replica failed the request, refused it, or was lost.
        """
        limit_s = None if deadline_s is None else self._loop_time_of(deadline_s + _DEADLINE_GRACE_S)
        num_before = len(resumable.output_token_ids)
        self._watch.begin(placement.in_flight)
        resumable.timeline.placed(self._table.now(), placement.in_flight.replica_id, placement.reason)
        try:
            sent_request = replace(
                request,
                expected_output_tokens=placement.expected_output_tokens,
                is_promoted=placement.is_promoted,
                ingress_id=self._table.ingress_id,
            )
            async with aclosing(self._client.generate(sent_request, placement.ranking)) as deltas:
                while (delta := await self._next(deltas, placement, limit_s)) is not None:
                    self._learn(delta, request, placement)
                    if delta.token_ids or delta.text or delta.prompt_logprobs or delta.error is None:
                        yield resumable.record(delta, self._table.now(), placement.in_flight.replica_id)
                    if delta.error is not None:
                        raise delta.error
            if not resumable.is_finished:
                raise ReplicaLost("the replica's stream ended before the sequence did")
        except (Overloaded, NoReplicaAvailable):
            self._flow.refused(placement, request)
            raise
        except (ReplicaLost, EngineDead):
            self._flow.forget(placement.in_flight.replica_id)
            raise
        finally:
            self._watch.end(placement.in_flight)
            self._flow.settle(placement, request, len(resumable.output_token_ids) - num_before)

    async def _next(
        self, deltas: AsyncGenerator[TokenDelta, None], placement: Placement, limit_s: float | None
    ) -> TokenDelta | None:
        """Return the next delta; None at the end of the stream.

        `limit_s` is a time of the event loop's clock. It limits this wait alone, so a slow reader is not interrupted
        while it processes a delta. It lies a little after the deadline, which the engine enforces itself.

        Raises:
            DeadlineExceeded: no delta came in time.
            ReplicaLost: the replica hangs, or is to leave.
            Overloaded: the replica is full, and another one is not.
        """
        try:
            async with self._watch.within(placement.in_flight, limit_s):
                return await anext(deltas, None)
        except TimeoutError:
            self._watch.check(placement.in_flight)
            raise DeadlineExceeded("the deadline passed and the replica did not answer") from None
        finally:
            self._watch.waited(placement.in_flight)

    def _learn(self, delta: TokenDelta, request: GenerateRequest, placement: Placement) -> None:
        """Update the load table from a delta."""
        if delta.stats is not None:
            if delta.stats.replica_id != placement.in_flight.replica_id:
                # The intended replica did not take the request. It gets no more requests until it reports again.
                self._table.forget(placement.in_flight.replica_id)
                self._table.move(placement.in_flight, delta.stats.replica_id)
            is_first = not placement.in_flight.is_seen
            self._flow.account.progressed(placement, request, len(delta.token_ids))
            # The deltas of one step share a report. After the first of them only a request's first output makes room.
            if self._table.record(delta.stats) or is_first:
                self._watch.heard(delta.stats)
                self._flow.notify()

    def _learn_end(self, request: GenerateRequest, timeline: Timeline, stats: ReplicaStats | None) -> None:
        assert timeline.queued_s is not None and timeline.first_delta_s is not None and timeline.finished_s is not None
        num_tokens, started_s = timeline.num_output_tokens, timeline.queued_s
        if request.params.max_tokens:
            self._flow.lengths.observe(request.tenant, request.band, num_tokens)
        ttft_s, duration_s = timeline.first_delta_s - started_s, timeline.finished_s - started_s
        auto_tpot_s = None if stats is None else stats.tpot_targets_s[request.band]
        self._observer.finished(request.band, ttft_s, duration_s, num_tokens, auto_tpot_s)

    async def _learn_replicas(self) -> None:
        """Fill an empty load table from a poll. A failed poll is only logged: the request waits for the first replica.

        Concurrent requests poll one after the other, until a poll finds a replica.
        """
        async with self._learning:
            if not len(self._table):
                await self._try_refresh()

    def _leave_replica(self, resumable: ResumableRequest, request_id: str, error: ServingError) -> None:
        """Note that a request left a replica because of `error`.

        Raises:
            ServingError: the request must not go to another replica.
        """
        fields = {"request_id": request_id, "cause": str(error)}
        if isinstance(error, Overloaded | NoReplicaAvailable):
            resumable.timeline.refused(self._table.now())
            resumable.num_refusals += 1
            if resumable.num_refusals > _MAX_REFUSALS:
                raise error
            logger.debug("request comes back from a replica without room", extra=fields)
            return
        resumable.record_migration(
            has_died=isinstance(error, EngineDead) or (isinstance(error, ReplicaLost) and error.has_died),
            now=self._table.now(),
        )
        if resumable.num_deaths > _DEATHS_BEFORE_ALONE:
            self._observer.migrated("failed")
            raise RequestQuarantined(f"{resumable.num_deaths} replicas died while serving the request") from error
        if resumable.num_migrations > _MAX_MIGRATIONS:
            self._observer.migrated("failed")
            raise error
        self._observer.migrated("resumed" if resumable.output_token_ids else "restarted")
        logger.warning("request moves to another replica", extra={**fields, "num_deaths": resumable.num_deaths})

    def _deadline_s(self, request: GenerateRequest) -> float | None:
        if request.deadline_unix_s is None:
            return None
        return self._table.now() + request.deadline_unix_s - self._unix_clock()

    def _loop_time_of(self, moment_s: float) -> float:
        return asyncio.get_running_loop().time() + moment_s - self._table.now()
