"""Replicas that die, stop, drain and refuse at random: every stream is the right one or ends with an error."""

import asyncio
import random

import pytest

from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    NoReplicaAvailable,
    Overloaded,
    ReplicaLost,
    RequestQuarantined,
    ServingError,
)
from replicas.protocol import Band, GenerateRequest
from router.watch import WatchSettings
from testkit.router.dispatch_worlds import Outcome, World, read
from testkit.router.flow_worlds import limits
from testkit.router.simulated_replicas import FakeReplica, request
from tests.seeds import Seeds

EXPECTED = (Overloaded, DeadlineExceeded, NoReplicaAvailable, RequestQuarantined)


class RandomWorld:
    """A world, its requests, and what happens to both.

    A gentle one has at most two deaths, no deadlines, and replicas that refuse only when they drain.
    """

    def __init__(self, seed: int, is_gentle: bool) -> None:
        self.rng = random.Random(seed)
        self.num_replicas = 0
        self.is_gentle = is_gentle
        self.max_deaths = 2 if is_gentle else 1000
        self.world = World(
            limits=limits(max_requests=self.rng.choice([8, 1000]), promote_after_s=3.0), settings=WatchSettings(0.5)
        )
        self.everywhere: list[FakeReplica] = []
        for _ in range(self.rng.randrange(1, 5)):
            self.add_replica()
        self.outcomes: dict[GenerateRequest, Outcome] = {}

    def add_replica(self) -> None:
        self.num_replicas += 1
        replica = FakeReplica(
            f"replica-{self.num_replicas}",
            num_slots=self.rng.randrange(1, 6),
            max_waiting=64 if self.is_gentle else self.rng.choice([1, 3, 64]),
            tokens_per_delta=self.rng.randrange(1, 4),
            step_s=self.rng.choice([0.02, 0.05, 0.1]),
            fails_in_delta=self.rng.random() < 0.5,
        )
        self.everywhere.append(self.world.client.add(replica))

    async def run(self) -> None:
        background = [asyncio.create_task(self.world.dispatcher.run()), asyncio.create_task(self.inject_faults())]
        await asyncio.gather(*(self.one_client(number) for number in range(self.rng.randrange(5, 30))))
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self.world.replicas = tuple(self.everywhere)
        self.world.check_idle()

    async def one_client(self, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * 3)
        wanted = request(
            str(number), tuple(rng.randrange(50) for _ in range(rng.randrange(1, 30))), rng.randrange(1, 40),
            rng.choice(list(Band)), rng.choice("xyz"), seed=number,
            deadline_unix_s=None if self.is_gentle or rng.random() < 0.7 else self.world.clock.unix() + rng.random(),
            prompt_logprobs=rng.choice([None, None, 0]),
        )  # fmt: skip
        reading = asyncio.create_task(read(self.world.stream(wanted)))
        if rng.random() < 0.15:
            await asyncio.sleep(rng.random() * 2)
            reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            self.outcomes[wanted] = reading.result()

    async def inject_faults(self) -> None:
        num_deaths = 0
        while True:
            await asyncio.sleep(self.rng.random() * 0.4)
            replica = self.rng.choice(list(self.world.client.replicas.values()) or [None])
            match self.rng.randrange(6):
                case 0 if replica is not None and num_deaths < self.max_deaths:
                    num_deaths += 1
                    replica.die(self.rng.choice([ReplicaLost("died"), EngineDead("the engine died")]))
                case 1 if replica is not None:
                    replica.stop()
                case 2 if replica is not None:
                    replica.drain()
                case 3:
                    is_failing = self.world.client.poll_error is None and self.rng.random() < 0.5
                    self.world.client.poll_error = ReplicaLost("no answer") if is_failing else None
                case _:
                    self.add_replica()
            ended = [replica for replica in self.world.client.replicas.values() if replica.death]
            for gone in [replica for replica in ended if self.rng.random() < 0.5]:
                del self.world.client.replicas[gone.replica_id]


@pytest.mark.random_worlds(200, per_call=20)
async def test_every_stream_is_right_or_ends_with_an_error(seeds: Seeds):
    num_right = 0
    for seed in seeds:
        world = RandomWorld(seed, is_gentle=False)
        await world.run()
        for wanted, outcome in world.outcomes.items():
            if outcome.error is None:
                outcome.check(wanted)
                num_right += 1
            else:
                assert isinstance(outcome.error, EXPECTED), outcome.error
    assert num_right > 150 or not seeds.are_many


@pytest.mark.random_worlds(100, per_call=10, examples=(207225705209,))
async def test_two_deaths_and_any_number_of_stops_fail_no_request(seeds: Seeds):
    for seed in seeds:
        world = RandomWorld(seed, is_gentle=True)
        await world.run()
        for wanted, outcome in world.outcomes.items():
            if not is_refusal_at_the_door(outcome.error):
                outcome.check(wanted)


def is_refusal_at_the_door(error: ServingError | None) -> bool:
    return isinstance(error, Overloaded) and "the limit is 8" in str(error)
