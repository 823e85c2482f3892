"""Random worlds of channels: ingresses over replicas with real engines, clients that leave, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import aclosing
from dataclasses import replace

from replicas.engine.outbox import Coalescing, FlushPolicy
from replicas.errors import NoReplicaAvailable, RequestQuarantined
from replicas.protocol import Band
from replicas.transport.channels import ChannelWaits
from router.dispatch import Dispatcher
from router.transport.submission import ChannelLimits
from serve_app.monitoring.http import HttpMetrics
from testkit.engine.shadow_runner import continuation, request
from testkit.http.local_service import LocalRouting
from testkit.limits import LIMIT_S, until
from testkit.router.local_channels import LocalChannelClient, LocalReplica


class ChannelWorld:
    """Ingresses over replicas, with clients that read slowly, leave, and lose their replicas and ingresses."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.replicas: dict[str, LocalReplica] = {}
        self.everywhere: list[LocalReplica] = []
        self.coalescing = self.rng.choice([Coalescing(), Coalescing(FlushPolicy(0.004, 4))])
        for _ in range(self.rng.randrange(1, 4)):
            self.add_replica()
        self.num_ingresses = 0
        self.num_right = 0

    def add_replica(self) -> None:
        replica = LocalReplica(f"replica-{len(self.everywhere)}", self.coalescing, waits=ChannelWaits(0.2, 0.2))
        self.replicas[replica.replica_id] = replica
        self.everywhere.append(replica)

    async def run(self) -> None:
        faults = asyncio.create_task(self.inject_faults())
        await asyncio.gather(*(self.one_ingress() for _ in range(self.rng.randrange(1, 4))))
        faults.cancel()
        await until(lambda: all(replica.is_whole for replica in self.replicas.values()))
        for replica in self.everywhere:
            replica.check_invariants()
            await replica.close()

    async def one_ingress(self) -> None:
        self.num_ingresses += 1
        ingress_id = f"ingress-{self.num_ingresses}"
        limits = ChannelLimits(idle_s=0.02, last_delta_s=0.5, max_submitted=self.rng.choice([1, 3, 64]))
        client = LocalChannelClient(ingress_id, self.replicas, limits)
        client.transport.submit_s = self.rng.choice([0.0, 0.001, 0.03])
        dispatcher = LocalRouting(client, HttpMetrics("demo")).dispatcher
        polling = asyncio.create_task(dispatcher.run())
        clients = [asyncio.create_task(self.one_client(dispatcher, n)) for n in range(self.rng.randrange(3, 20))]
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 0.1)
            client.transport.is_cut = True
            for task in clients:
                task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        client.pool.check_invariants()
        assert not client.pool.serving()
        await until(lambda: not (client.pool._unsent or client.pool._on_way))
        if client.transport.is_cut:
            for replica in self.everywhere:
                replica.lost_ingresses.add(ingress_id)
        else:
            for task in clients:
                if not task.cancelled():
                    task.result()
        polling.cancel()

    async def one_client(self, dispatcher: Dispatcher, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.choice([0.0, rng.random() * 0.05]))
        prompt = tuple(rng.randrange(90) for _ in range(rng.randrange(1, 12)))
        asked = replace(
            request(f"r{number}", prompt, max_tokens=rng.randrange(1, 60)),
            band=rng.choice(list(Band)),
            delta_interval_s=rng.choice([None, None, 0.01]),
        )
        leaves_after = rng.choice([None, None, 0, rng.randrange(1, 20)])
        is_slow = rng.random() < 0.3
        got: list[int] = []
        with contextlib.suppress(NoReplicaAvailable, RequestQuarantined):
            [stream] = dispatcher.streams([asked])
            async with asyncio.timeout(LIMIT_S), aclosing(stream):
                async for delta in stream:
                    got += delta.token_ids
                    assert tuple(got) == continuation(prompt, len(got))
                    if leaves_after is not None and len(got) > leaves_after:
                        break
                    if is_slow:
                        await asyncio.sleep(rng.random() * 0.02)
            assert leaves_after is not None or len(got) == asked.params.max_tokens
            self.num_right += leaves_after is None

    async def inject_faults(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 0.03)
            replica = self.rng.choice(list(self.replicas.values()))
            match self.rng.randrange(3):
                case 0:
                    replica.die()
                    del self.replicas[replica.replica_id]
                    self.add_replica()
                case 1:
                    replica.break_channels()
                case _:
                    self.add_replica()
            if len(self.replicas) > 4:
                victim = self.rng.choice(list(self.replicas))
                self.replicas.pop(victim).die()
