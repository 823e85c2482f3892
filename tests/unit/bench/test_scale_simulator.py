"""The simulator of many ingresses and replicas: its loads, its faults, and its model of a replica."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from bench.scale.arrivals import LOADS, SimulatedRequest, arrivals_of, made_up, write_trace
from bench.scale.cluster import Fault
from bench.scale.engine_model import ModelledEngine
from bench.scale.simulator import World, fairness, jain, run
from replicas.engine.config import EngineConfig
from replicas.errors import ReplicaLost
from replicas.protocol import BANDS, Band, GenerateRequest, SamplingParams
from serve_app.benchmark.trace import read_requests
from testkit.engine.timed_runner import STEP_TIMES
from testkit.router.simulated_time import SimulatedLoop, simulated_clock
from tests.seeds import Seeds


def test_ingresses_together_serve_as_much_as_one_and_keep_the_order_of_bands() -> None:
    alone, together = (run(World(number, 4, num_slots=8, overload=3.0, duration_s=5.0)) for number in (1, 3))
    assert together["tokens_per_s"] == pytest.approx(alone["tokens_per_s"], rel=0.1)
    assert together["ttft_p99_s"]["interactive"] < 0.5, "simulated time: a few steps"
    assert together["queue_p99_s"]["interactive"] < 0.1 < together["queue_p99_s"]["standard"]
    assert together["batch_before_waiting_interactive"] == together["failed"] == 0


@pytest.mark.parametrize("load", LOADS)
def test_the_model_of_a_replica_does_as_the_scheduler(load: str) -> None:
    real, modelled = (
        run(World(2, 4, 16, overload=2.0, duration_s=10.0, load=load, engines=kind)) for kind in ("scheduler", "model")
    )
    assert modelled["tokens_per_s"] == pytest.approx(real["tokens_per_s"], rel=0.03)
    assert modelled["prefix_hits"] == pytest.approx(real["prefix_hits"], abs=0.06)
    assert (real["prefix_hits"] > 0.2) == (load == "uneven")
    for kind in ("queue_p50_s", "ttft_p50_s"):
        assert modelled[kind]["interactive"] == pytest.approx(real[kind]["interactive"], rel=0.15, abs=0.01)


@pytest.mark.parametrize("kind", ["scheduler", "model"])
def test_faults_lose_no_request_and_keep_the_order_of_bands(kind: str) -> None:
    faults = (Fault.REPLICA, Fault.STALE, Fault.INGRESS)
    figures = run(World(3, 4, 8, overload=1.5, duration_s=12.0, faults=faults, engines=kind))
    undisturbed = run(World(3, 4, 8, overload=1.5, duration_s=12.0, engines=kind))
    assert figures["failed"] == figures["batch_before_waiting_interactive"] == 0
    assert figures["sent_again"] > 0
    assert 0.75 < figures["tokens_per_s"] / undisturbed["tokens_per_s"] < 1


def test_a_trace_is_replayed_as_it_was_made_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = list(made_up(LOADS["uneven"], requests_per_s=50.0, duration_s=5.0))
    write_trace(path, requests)
    assert read_requests(path, SimulatedRequest) == requests


def test_a_trace_of_headway_bench_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"time": 0.5, "prompt_tokens": 20, "max_tokens": 64, "band": "interactive"}\n'
        '{"time": 0.1, "prompt": "What is the capital of France?", "max_tokens": 8}\n'
    )
    first, second = arrivals_of(read_requests(path, SimulatedRequest))
    assert (first.at_s, len(first.request.prompt_token_ids), first.request.band) == (0.1, 7, Band.STANDARD)
    assert (second.at_s, len(second.request.prompt_token_ids), second.request.band) == (0.5, 20, Band.INTERACTIVE)
    figures = run(World(2, 1, 8, overload=1.0, duration_s=8.0, trace=path))
    assert figures["tokens_per_s"] * 8.0 == 72


def test_loads_come_in_order_at_their_rate() -> None:
    for load in LOADS.values():
        requests = list(made_up(load, requests_per_s=200.0, duration_s=50.0))
        assert all(a.time <= b.time for a, b in pairwise(requests))
        assert len(requests) == pytest.approx(10_000, rel=0.1)


def test_fairness_is_that_of_the_shares_that_tenants_ask_for() -> None:
    assert jain([5, 5, 5]) == 1.0
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert fairness({"a": 5, "b": 5}, {"a": 50, "b": 70}) == 1.0
    assert fairness({"a": 2, "b": 8}, {"a": 2, "b": 70}) == 1.0, "the first tenant asks for no more"
    assert fairness({"a": 8, "b": 2}, {"a": 50, "b": 70}) < 0.8


async def first_token_s(kind: str, requests: Sequence[GenerateRequest]) -> list[float]:
    """Return each request's time to first token on one replica; the requests come 10 ms apart."""
    clock = simulated_clock()
    replica = World(1, 1, 16, overload=1.0, duration_s=1.0, engines=kind).new_replica(clock, "a")
    running = asyncio.create_task(replica.run())

    async def read(number: int, request: GenerateRequest) -> float:
        await asyncio.sleep(0.01 * number)
        begun_s, stream = clock.now, replica.generate(request)
        await anext(stream)
        await stream.aclose()
        return clock.now - begun_s

    times_s = await asyncio.gather(*(read(*numbered) for numbered in enumerate(requests)))
    running.cancel()
    return times_s


@pytest.mark.parametrize("has_prefix", [False, True])
def test_the_model_orders_prompts_as_the_scheduler(has_prefix: bool) -> None:
    """Interactive prompts pass the others, and a prompt whose prefix is being computed waits for it."""

    def request(number: int, band: Band) -> GenerateRequest:
        prefix = (7,) * 256 if has_prefix else (100 + number,) * 256
        return GenerateRequest(f"r{number}", (*prefix, *range(16, 60)), SamplingParams(5, ignore_eos=True), band)

    requests = [request(number, Band.STANDARD) for number in range(12)] + [request(12, Band.INTERACTIVE)]
    times_s = []
    for kind in ("scheduler", "model"):
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            times_s.append(runner.run(first_token_s(kind, requests)))
    real, modelled = times_s
    assert modelled[-1] == pytest.approx(real[-1], rel=0.25)
    assert statistics.mean(modelled) == pytest.approx(statistics.mean(real), rel=0.1)


class EngineWorld:
    """One modelled replica with clients that read to the end or leave."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        config = EngineConfig(
            num_blocks=64, max_model_len=512, max_num_seqs=self.rng.randrange(1, 6),
            max_num_batched_tokens=self.rng.choice([16, 64]), async_scheduling=True, vocab_size=2**31,
        )  # fmt: skip
        self.clock = simulated_clock()
        self.replica = ModelledEngine(config, STEP_TIMES["slow-gpu"], self.clock, "a")

    async def run(self, num_requests: int = 40) -> None:
        """Run requests, and check the invariants all the while."""
        running = asyncio.create_task(self.replica.run())
        clients = [asyncio.create_task(self.client(number)) for number in range(num_requests)]
        while not all(client.done() for client in clients):
            await asyncio.sleep(0.013)
            self.replica.check_invariants()
        await asyncio.gather(*clients)
        stats = self.replica.stats()
        assert stats.num_running == stats.num_waiting == stats.outstanding_tokens == 0 and not stats.by_ingress
        running.cancel()

    async def client(self, number: int) -> None:
        """Read one request, or leave it after a while."""
        await asyncio.sleep(self.rng.uniform(0, 5))
        length, num_known = self.rng.randrange(1, 60), self.rng.choice([0, 0, 5])
        request = GenerateRequest(
            f"r{number}",
            tuple(range(16, 16 + self.rng.randrange(1, 150))),
            SamplingParams(length + num_known, ignore_eos=True),
            self.rng.choice(BANDS),
            output_token_ids=(1,) * num_known,
            is_promoted=self.rng.random() < 0.1,
        )
        leaves_after = self.rng.choice([0, 20, 10**6])
        num_tokens, stream = 0, self.replica.generate(request)
        async for delta in stream:
            assert delta.start == num_known + num_tokens
            num_tokens += len(delta.token_ids)
            if num_tokens > leaves_after:
                break
        else:
            assert num_tokens == length
        await stream.aclose()


@pytest.mark.random_worlds(40, per_call=10)
def test_a_modelled_replica_gives_every_token_once_and_every_slot_comes_back(seeds: Seeds) -> None:
    async def one(seed: int) -> None:
        await EngineWorld(seed).run()

    for seed in seeds:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(one(seed))


def test_a_modelled_replica_that_dies_fails_its_streams() -> None:
    async def die() -> None:
        world = EngineWorld(1)
        running = asyncio.create_task(world.replica.run())
        stream = world.replica.generate(GenerateRequest("r", (16,) * 8, SamplingParams(50, ignore_eos=True)))
        await anext(stream)
        running.cancel()
        world.replica.die()
        with pytest.raises(ReplicaLost):
            await anext(stream)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(die())
