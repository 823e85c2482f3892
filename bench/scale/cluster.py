"""Cluster of the simulator: ingresses with the real router in front of simulated replicas, and faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum

from replicas.errors import DeadlineExceeded, Overloaded, ServingError
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta, Usage
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens, PrefixIndex
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController
from serve_app.config import HeadwayConfig
from testkit.router.simulated_engines import EngineClient, SimulatedEngine
from testkit.router.simulated_replicas import FakeObserver
from testkit.router.simulated_time import FakeClock

RESTART_S = 2.0
"""Time in which a killed replica or ingress is replaced, and for which reports are stale."""
_RETRY_S = 0.1
"""Time between two attempts of a client while no ingress runs."""


class Fault(Enum):
    """Fault that is injected once in a run."""

    REPLICA = "replica"
    """A replica dies. Its streams go on elsewhere."""
    INGRESS = "ingress"
    """The ingress with most requests dies. Its clients send them again, to other ingresses."""
    STALE = "stale"
    """Every second ingress hears nothing new of any replica's load."""


@dataclass
class Seconds:
    """Times of requests, by band."""

    ended: dict[Band, list[float]] = field(default_factory=lambda: {band: [] for band in Band})
    begun: dict[str, tuple[Band, float]] = field(default_factory=dict)
    """Requests whose time has not ended, with its beginning."""

    def end(self, request: GenerateRequest, now_s: float) -> bool:
        """End the time of a request; return False if it has ended before."""
        begun = self.begun.pop(request.request_id, None)
        if begun is not None:
            self.ended[request.band].append(now_s - begun[1])
        return begun is not None

    def until(self, now_s: float) -> dict[Band, list[float]]:
        """Return all times, also of requests that still wait: up to now."""
        times = {band: list(ended) for band, ended in self.ended.items()}
        for band, begun_s in self.begun.values():
            times[band].append(now_s - begun_s)
        return times


@dataclass
class Tally:
    """Figures that are collected while the simulation runs. A request that is sent again counts once."""

    before_urgent: int = 0
    """Batch requests dispatched by an ingress while an interactive one waited there."""
    refused: Counter[Band] = field(default_factory=Counter)
    failed: int = 0
    """Requests that ended with another error."""
    num_sent_again: int = 0
    """Requests whose ingress died, so that their clients sent them again."""
    num_sent_back: int = 0
    """Requests that a replica refused."""
    tokens: Counter[Band] = field(default_factory=Counter)
    tokens_by_tenant: Counter[str] = field(default_factory=Counter)
    """Output tokens of the band `standard`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: Seconds = field(default_factory=Seconds)
    """Time from a request's arrival to its first dispatch."""
    ttft_s: Seconds = field(default_factory=Seconds)
    outstanding: list[float] = field(default_factory=list)
    """Greatest over mean outstanding tokens of the replicas, sampled."""

    def arrived(self, request: GenerateRequest, now_s: float) -> None:
        """Count a request's arrival at its client."""
        for times in (self.queue_s, self.ttft_s):
            times.begun[request.request_id] = request.band, now_s

    def begun(self, request: GenerateRequest, usage: Usage, now_s: float) -> None:
        """Count the first token of a request, unless it had one before it was sent again."""
        if self.ttft_s.end(request, now_s):
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    def generated(self, request: GenerateRequest, num_tokens: int) -> None:
        """Count output tokens; a negative number takes back those of an attempt that broke."""
        self.tokens[request.band] += num_tokens
        if request.band is Band.STANDARD:
            self.tokens_by_tenant[request.tenant] += num_tokens

    def ended(self, request: GenerateRequest) -> None:
        """Note the end of a request: one without tokens has no times."""
        for times in (self.queue_s, self.ttft_s):
            times.begun.pop(request.request_id, None)


class Ingress:
    """One ingress: the real parts over a client of all replicas. It is the client itself, to see each dispatch."""

    def __init__(self, name: str, seed: int, replicas: EngineClient, num_slots: int, clock: FakeClock, tally: Tally):
        self._replicas = replicas
        self._tally = tally
        self._clock = clock
        table, observer = LoadTable(clock, name), FakeObserver()
        limits = HeadwayConfig(max_num_seqs=num_slots).flow_limits()
        self.flow = FlowController(limits, table, LeastTokens(random.Random(seed), PrefixIndex()), observer)
        self.dispatcher = Dispatcher(self, self.flow, observer, unix_clock=clock.unix)
        self.polling: asyncio.Task[None] | None = None
        self.is_dead = False
        self.readers: dict[asyncio.Task[None], None] = {}
        """Tasks of the clients whose requests are here."""
        self._old: dict[str, ReplicaStats] | None = None
        """Reports that it gets instead of newer ones; None: it gets the newest."""

    def start(self) -> None:
        """Begin to poll the replicas."""
        self.polling = asyncio.create_task(self.dispatcher.run())

    async def hear_nothing_new(self, duration_s: float) -> None:
        """Get the reports of this moment for a while, however old they become."""
        self._old = {stats.replica_id: stats for stats in await self._replicas.poll_stats()}
        await asyncio.sleep(duration_s)
        self._old = None

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request, and count its dispatch."""
        self._tally.queue_s.end(request, self._clock.now)
        if request.band is Band.BATCH and not request.is_promoted:
            self._tally.before_urgent += self.flow.queue.num_requests(Band.INTERACTIVE) > 0
        try:
            async with aclosing(self._replicas.generate(request, ranking)) as deltas:
                async for delta in deltas:
                    if self._old is not None and delta.stats is not None:
                        delta = delta._replace(stats=self._heard(delta.stats))
                    yield delta
        except Overloaded:
            self._tally.num_sent_back += 1
            raise

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the load of all replicas."""
        return [self._heard(stats) for stats in await self._replicas.poll_stats()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return the metrics of all replicas."""
        return await self._replicas.poll_metrics()

    async def drain(self, replica_id: str) -> bool:
        """Have a replica refuse new requests."""
        return await self._replicas.drain(replica_id)

    async def describe(self) -> ModelCard:
        """Refuse: simulated replicas have no model."""
        return await self._replicas.describe()

    def _heard(self, stats: ReplicaStats) -> ReplicaStats:
        return stats if self._old is None else self._old.get(stats.replica_id, stats)


class Cluster:
    """Ingresses and replicas, and what befalls them."""

    def __init__(
        self, make_replica: Callable[[str], SimulatedEngine], num_replicas: int, num_ingresses: int, num_slots: int,
        clock: FakeClock, tally: Tally,
    ) -> None:  # fmt: skip
        self._make_replica = make_replica
        self._num_slots = num_slots
        self._clock = clock
        self._tally = tally
        self._num_made = 0
        self._running: dict[str, asyncio.Task[None]] = {}
        self.client = EngineClient([])
        for _ in range(num_replicas):
            self._add_replica()
        self.ingresses = [self._new_ingress(number) for number in range(num_ingresses)]

    async def start(self) -> None:
        """Start the ingresses, which poll the replicas at different moments."""
        for ingress in self.ingresses:
            ingress.start()
            await asyncio.sleep(0.5 / len(self.ingresses))

    async def stop(self) -> None:
        """End all tasks of the cluster."""
        tasks = [*self._running.values(), *(each.polling for each in self.ingresses if each.polling is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def inject(self, fault: Fault) -> None:
        """Inject a fault, and repair it after `RESTART_S`."""
        if fault is Fault.REPLICA:
            await self._lose_replica()
        elif fault is Fault.INGRESS:
            await self._lose_ingress()
        else:
            await asyncio.gather(*(each.hear_nothing_new(RESTART_S) for each in self.ingresses[::2]))

    async def read(self, request: GenerateRequest, place: float) -> None:
        """Read one request to its end, at the ingress of that place or, if it is dead, at the next one."""
        self._tally.arrived(request, self._clock.now)
        while not await self._read_at(await self._ingress_at(place), request):
            self._tally.num_sent_again += 1
        self._tally.ended(request)

    async def _ingress_at(self, place: float) -> Ingress:
        first = int(place * len(self.ingresses))
        while True:
            for ingress in self.ingresses[first:] + self.ingresses[:first]:
                if not ingress.is_dead:
                    return ingress
            await asyncio.sleep(_RETRY_S)

    async def _read_at(self, ingress: Ingress, request: GenerateRequest) -> bool:
        """Read a request; return False if its ingress died."""
        reader = asyncio.current_task()
        assert reader is not None
        ingress.readers[reader] = None
        num_tokens = 0
        try:
            async for delta in ingress.dispatcher.streams([request])[0]:
                self._tally.begun(request, delta.usage, self._clock.now)
                self._tally.generated(request, len(delta.token_ids))
                num_tokens += len(delta.token_ids)
        except (Overloaded, DeadlineExceeded):
            self._tally.refused[request.band] += 1
        except ServingError:
            self._tally.failed += 1
        except asyncio.CancelledError:
            if not ingress.is_dead:
                raise
            reader.uncancel()
            self._tally.generated(request, -num_tokens)
            return False
        finally:
            del ingress.readers[reader]
        return True

    async def _lose_replica(self) -> None:
        replica_id = next(iter(self.client.engines))
        self._running.pop(replica_id).cancel()
        self.client.engines.pop(replica_id).die()
        await asyncio.sleep(RESTART_S)
        self._add_replica()

    async def _lose_ingress(self) -> None:
        lost = max(self.ingresses, key=lambda ingress: len(ingress.readers))
        number = self.ingresses.index(lost)
        lost.is_dead = True
        if lost.polling is not None:
            lost.polling.cancel()
        for reader in list(lost.readers):
            reader.cancel()
        await asyncio.sleep(RESTART_S)
        self.ingresses[number] = self._new_ingress(number)
        self.ingresses[number].start()

    def _add_replica(self) -> None:
        replica_id = f"replica-{self._num_made:04}"
        self._num_made += 1
        replica = self.client.engines[replica_id] = self._make_replica(replica_id)
        self._running[replica_id] = asyncio.create_task(replica.run())

    def _new_ingress(self, number: int) -> Ingress:
        name = f"ingress-{number}-{self._clock.now}"
        return Ingress(name, number, self.client, self._num_slots, self._clock, self._tally)
