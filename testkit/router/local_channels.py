"""Replicas in this process whose channels are carried like by Ray: every call has a task and a queue of its own."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.batch import ItemResult, ScheduledBatch
from replicas.engine.engine import Engine
from replicas.engine.outbox import Coalescing
from replicas.errors import NoReplicaAvailable, ReplicaLost, ServingError
from replicas.protocol import EngineMetrics, GenerateRequest, ModelCard, ReplicaIdentity, ReplicaStats, TokenDelta
from replicas.transport.channels import ChannelWaits, ReplicaChannels
from replicas.transport.wire import ChannelId, DeltaBatch, NumberedRequest, StreamFailure, decoded, encoded
from router.transport.channel_pool import ChannelPool
from router.transport.submission import ChannelLimits
from testkit.engine.shadow_runner import ShadowRunner, config, decoders
from testkit.limits import LIMIT_S, until

QUICK = ChannelLimits(idle_s=0.05, last_delta_s=0.05)
PATIENT = ChannelWaits(LIMIT_S, LIMIT_S)
_END = object()
_WAITS = ChannelWaits(reader_s=1.0, idle_s=0.2)


class PacedRunner(ShadowRunner):
    """Shadow runner whose steps take a millisecond."""

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        time.sleep(0.001)
        return super().execute(batch)


class LocalReplica:
    """Replica over a shadow runner, with the calls that run on it."""

    def __init__(self, replica_id: str, coalescing: Coalescing | None = None, waits: ChannelWaits = _WAITS) -> None:
        limits = config(max_queued_requests=5000)
        engine = Engine(limits, PacedRunner(limits.block_size), decoders, ReplicaIdentity(replica_id, "node", 1))
        self.replica_id = replica_id
        self.engine = AsyncEngine(engine, coalescing or Coalescing())
        self.lost_ingresses: set[str] = set()
        self.channels = ReplicaChannels(replica_id, self.engine, self.lost_ingresses.__contains__, waits)
        self.calls: dict[asyncio.Task[None], asyncio.Queue[object]] = {}
        self.reads: list[asyncio.Task[None]] = []
        self.is_dead = False
        self.num_batches = 0
        self.engine.start()

    async def read(self, replica_id: str, channel_id: ChannelId) -> AsyncGenerator[bytes, None]:
        if replica_id == self.replica_id:
            async with aclosing(self.channels.read(channel_id)) as batches:
                async for batch in batches:
                    self.num_batches += 1
                    yield encoded(batch)

    def begin(self, make: Callable[[], AsyncGenerator[Any, None]]) -> tuple[asyncio.Task[None], asyncio.Queue[object]]:
        """Run a call on the replica; its results go into a queue, as copies."""
        results: asyncio.Queue[object] = asyncio.Queue()

        async def run() -> None:
            try:
                async with aclosing(make()) as items:
                    async for item in items:
                        results.put_nowait(pickle.loads(pickle.dumps(item)))
                results.put_nowait(_END)
            except ServingError as error:
                results.put_nowait(error)

        task = asyncio.create_task(run())
        self.calls[task] = results
        task.add_done_callback(self.calls.pop)
        return task, results

    def die(self) -> None:
        """End all calls like the death of their process: their callers hear of it, the replica does nothing more."""
        self.is_dead = True
        self._end(list(self.calls), ReplicaLost("died"))

    def break_channels(self) -> None:
        """End the calls that carry channels, and no others."""
        self._end([task for task in self.calls if task in self.reads], ReplicaLost("broken", has_died=False))

    def _end(self, tasks: list[asyncio.Task[None]], error: ReplicaLost) -> None:
        for task in tasks:
            task.cancel()
            self.calls[task].put_nowait(error)

    def check_invariants(self) -> None:
        """Fail if an invariant of the channels does not hold, or one of a living replica's idle engine."""
        self.channels.check_invariants()
        if not self.is_dead:
            self.engine._engine.check_invariants()

    async def close(self) -> None:
        for task in list(self.calls):
            task.cancel()
        await self.engine.stop()

    @property
    def is_whole(self) -> bool:
        """True if nothing runs or waits, and every block is free."""
        stats = self.engine.stats()
        is_idle = not (stats.num_running or stats.num_waiting or self.engine._mailboxes)
        return is_idle and stats.num_free_blocks == stats.num_blocks


class LocalTransport:
    """Transport of one ingress to local replicas. Serve's part is to take the first replica of a ranking that lives."""

    def __init__(self, replicas: dict[str, LocalReplica]) -> None:
        self.replicas = replicas
        self.refused: set[str] = set()
        """Replicas that take no request now, so that the next one of a ranking does."""
        self.submit_s = 0.0
        """Time that a request takes to a replica, seconds."""
        self.is_open = asyncio.Event()
        """Set if requests come to a replica at all; else they wait on their way."""
        self.is_open.set()
        self.is_cut = False
        """True if this ingress has died: no call of it is cancelled any more."""
        self.submitted: list[Sequence[NumberedRequest]] = []
        """Requests of each call, in order."""
        self.num_lost_aborts = 0
        """Next calls to abort streams that do not come to a replica."""
        self.num_lost_acknowledgements = 0
        """Next acknowledgements that do not come to a replica."""

    def submit(
        self, requests: Sequence[NumberedRequest], ranking: list[str], channel_id: ChannelId
    ) -> AsyncGenerator[str | StreamFailure, None]:
        self.submitted.append(requests)
        return self._called(
            [name for name in (*ranking, *self.replicas) if name not in self.refused],
            lambda replica: replica.channels.submit(requests, channel_id),
        )

    async def abort(self, replica_id: str, channel_id: ChannelId, numbers: Sequence[int]) -> None:
        await asyncio.sleep(self.submit_s)
        replica = self.replicas.get(replica_id)
        if replica is None or replica.is_dead or self.is_cut or self.num_lost_aborts:
            self.num_lost_aborts = max(0, self.num_lost_aborts - 1)
            raise NoReplicaAvailable("the replica does not answer")
        replica.channels.abort(channel_id, numbers)

    async def acknowledge(self, replica_id: str, channel_id: ChannelId, num_batches: int) -> None:
        await asyncio.sleep(self.submit_s)
        replica = self.replicas.get(replica_id)
        if replica is None or replica.is_dead or self.is_cut or self.num_lost_acknowledgements:
            self.num_lost_acknowledgements = max(0, self.num_lost_acknowledgements - 1)
            raise NoReplicaAvailable("the replica does not answer")
        replica.channels.acknowledge(channel_id, num_batches)

    async def read(self, replica_id: str, channel_id: ChannelId) -> AsyncGenerator[DeltaBatch, None]:
        called = self._called([replica_id, *self.replicas], lambda replica: replica.read(replica_id, channel_id), True)
        async with aclosing(called) as messages:
            async for message in messages:
                yield decoded(message)

    async def _called(
        self, ranking: list[str], make: Callable[[LocalReplica], AsyncGenerator[Any, None]], is_read: bool = False
    ) -> AsyncGenerator[Any, None]:
        if not is_read:
            await self.is_open.wait()
            await asyncio.sleep(self.submit_s)
        replicas = [
            self.replicas[name] for name in ranking if name in self.replicas and not self.replicas[name].is_dead
        ]
        if not replicas:
            raise NoReplicaAvailable("no replica lives")
        task, results = replicas[0].begin(lambda: make(replicas[0]))
        if is_read:
            replicas[0].reads.append(task)
        try:
            while (item := await results.get()) is not _END:
                if isinstance(item, ServingError):
                    raise item
                yield item
        finally:
            if not self.is_cut:
                task.cancel()


class LocalChannelClient:
    """Client of local replicas over a channel pool; see `router.types.ReplicaClient`."""

    def __init__(self, ingress_id: str, replicas: dict[str, LocalReplica], limits: ChannelLimits) -> None:
        self.replicas = replicas
        self.stopping: set[str] = set()
        self.transport = LocalTransport(replicas)
        self.pool = ChannelPool(ingress_id, self.transport, self.stopping.__contains__, limits)

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        return self.pool.generate(request, ranking)

    async def poll_stats(self) -> list[ReplicaStats]:
        return [replica.engine.stats() for replica in self.replicas.values() if not replica.is_dead]

    async def poll_metrics(self) -> list[EngineMetrics]:
        return []

    async def drain(self, replica_id: str) -> bool:
        return False

    async def describe(self) -> ModelCard:
        raise NoReplicaAvailable("local replicas have no model")


@asynccontextmanager
async def running_channels(
    num_replicas: int = 1, coalescing: Coalescing | None = None, waits: ChannelWaits = PATIENT,
    limits: ChannelLimits = QUICK,
) -> AsyncIterator[tuple[LocalChannelClient, list[LocalReplica]]]:  # fmt: skip
    """One ingress and its replicas. At the end, no stream is left and every block of living replicas is free."""
    replicas = [LocalReplica(f"replica-{n}", coalescing, waits) for n in range(num_replicas)]
    client = LocalChannelClient("ingress", {replica.replica_id: replica for replica in replicas}, limits)
    try:
        yield client, replicas
        await until(lambda: all(replica.is_whole for replica in replicas if not replica.is_dead))
        client.pool.check_invariants()
        assert not client.pool.serving()
        await until(lambda: not calls_of_submissions())
        for replica in replicas:
            replica.check_invariants()
    finally:
        for replica in replicas:
            await replica.close()


def calls_of_submissions() -> list[asyncio.Task[None]]:
    """Return the calls to replicas that run."""
    return [task for task in asyncio.all_tasks() if "Submission" in repr(task.get_coro())]


async def until_gone(replica: LocalReplica) -> None:
    """Return when the replica has no request `gone` any more."""
    await until(lambda: not any(request_id.startswith("gone") for request_id in replica.engine._mailboxes))


async def read(client: LocalChannelClient, asked: GenerateRequest, ranking: str = "replica-0") -> list[TokenDelta]:
    """Return all deltas of a request."""
    async with asyncio.timeout(LIMIT_S):
        return [delta async for delta in client.generate(asked, [ranking])]


def token_ids(deltas: list[TokenDelta]) -> tuple[int, ...]:
    """Return the tokens of a request's deltas."""
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)
