"""The decisions over kept orders equal those of the reference, which looks at every replica each time."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from replicas.protocol import Band, GenerateRequest, IngressShare, SamplingParams
from router.balancing.load_table import InFlight, LoadTable
from router.balancing.policy import LeastTokens, PrefixIndex
from router.flow.capacity_index import CapacityIndex
from router.flow.flow_control import FlowController, FlowLimits, SampleGroup, _PendingPlacement
from router.flow.flow_queue import BandLimits
from router.flow.placements import Placement
from router.flow.slots import LateBinding
from router.timeline import Timeline
from router.types import Candidates, Reason
from testkit.router.plain_decisions import Choice, PlainDecisions, cluster_of
from testkit.router.simulated_replicas import FakeObserver, stats
from testkit.router.simulated_time import FakeClock
from tests.seeds import Seeds

_MAX_BLOCKS = 60
_NUM_CHANGES = 20


class CheckedFlow(FlowController):
    """Flow control that compares each of its dispatches with the reference's."""

    def __init__(self, limits: FlowLimits, table: LoadTable, slots: LateBinding, seed: int) -> None:
        self.observer = FakeObserver()
        policy = LeastTokens(random.Random(seed), PrefixIndex(_MAX_BLOCKS))
        super().__init__(limits, table, policy, self.observer, slots)
        self.plain = PlainDecisions(slots, PrefixIndex(_MAX_BLOCKS), random.Random(seed))
        self.chosen: Choice | None = None

    def forget(self, replica_id: str) -> None:
        super().forget(replica_id)
        self.plain.index.forget(replica_id)

    def _dispatch_next(self) -> bool:
        views, starved = self.table.views(), self.account.starved_bands()
        assert self.table.cluster() == cluster_of(views)
        self.plain.routings = {index: pending.routing for index, pending in self._pending.items()}
        expected = self.plain.next(self.queue, starved, views)
        self.chosen = None
        has_dispatched = super()._dispatch_next()
        assert self.chosen == expected
        assert has_dispatched is (expected is not None)
        if expected is not None:
            hashes = self.plain.routings[expected.arrival_index].block_hashes
            self.plain.index.add(expected.replica_id, hashes)
        return has_dispatched

    def _dispatch(self, pending: _PendingPlacement, candidates: Candidates, is_promoted: bool) -> None:
        super()._dispatch(pending, candidates, is_promoted)
        placement = pending.placement.result()
        index, reason = pending.queued.arrival_index, self.observer.decisions[-1]
        self.chosen = Choice(index, placement.ranking[0], reason, is_promoted)


class World:
    """Random ingress, whose flow control is compared with the reference."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = FakeClock()
        self.table = LoadTable(self.clock)
        slots = LateBinding(rng.choice([0, 0, 2]), rng.choice([0.0, 0.125]))
        bands = {band: BandLimits(10**6, 10**9) for band in Band}
        self.flow = CheckedFlow(FlowLimits(bands, rng.choice([1.0, 20.0])), self.table, slots, seed)
        # Of some worlds all replicas are much alike, so that many are equal.
        num_replicas = rng.choice([1, 2, 2, 3, 5, 8, rng.choice([8, 40, 100])])
        self.replica_ids = [f"replica-{number}" for number in range(num_replicas)]
        self.is_even = rng.random() < 0.5
        self.own: list[InFlight] = []
        self.asked: list[tuple[GenerateRequest, asyncio.Task[Placement]]] = []
        self.versions = dict.fromkeys(self.replica_ids, 1)
        for replica_id in self.replica_ids:
            self.report(replica_id)

    def report(self, replica_id: str) -> None:
        rng = self.rng
        self.versions[replica_id] += 1
        busy = [rng.choice([0, 0, 1, 2]) if not self.is_even else 0 for _ in range(6)]
        others = [IngressShare("other", tuple(map(sum, zip(busy[:3], busy[3:], strict=True))), 0)] * rng.randrange(2)
        self.table.record(
            replace(
                stats(
                    replica_id, taken=self.clock.unix(), running=busy[:3], waiting=busy[3:],
                    slots=rng.choice([1, 2, 4]) if not self.is_even else 4,
                    free_blocks=rng.choice([0, 2, 5, 1000]) if not self.is_even else 1000,
                    held=[rng.randrange(9) for _ in Band], rate=rng.random() * 100,
                    outstanding=rng.choice([0, 100, 200, rng.randrange(400)]) if not self.is_even else 0,
                    is_draining=rng.random() < 0.05, by_ingress=others,
                ),
                num_blocks=rng.choice([10, 1000]),
                version=self.versions[replica_id],
            )
        )  # fmt: skip

    def poll(self) -> None:
        """Poll all replicas that are known, of which some have not changed, but for one that does not answer."""
        views = self.table.views()
        silent = self.rng.choice([*views, None])
        polled = [
            replace(view.stats, taken_unix_s=self.clock.unix(), stalled_s=self.rng.random())
            for view in views
            if silent is None or view.stats.replica_id != silent.stats.replica_id
        ]
        for replica_id in self.table.replace(polled, self.clock.now).gone:
            self.flow.forget(replica_id)

    def change(self) -> None:
        """Change something other than the queue."""
        rng, self.clock.now = self.rng, self.clock.now + self.rng.random()
        replica_id = rng.choice(self.replica_ids)
        match rng.randrange(8):
            case 0 | 1:
                band, tenant = rng.choice(list(Band)), rng.choice("abc")
                self.own.append(self.table.begin(replica_id, band, rng.randrange(1, 50), rng.randrange(50), tenant))
            case 2 if self.own:
                self.table.end(self.own.pop(rng.randrange(len(self.own))))
            case 3 if self.own:
                self.table.progress(rng.choice(self.own), rng.randrange(5))
            case 4 if self.own:
                self.table.move(rng.choice(self.own), replica_id)
            case 5:
                self.poll()
            case 6 if rng.random() < 0.5:
                self.flow.forget(replica_id)
            case _:
                self.report(replica_id)

    def request(self, number: int) -> GenerateRequest:
        rng = self.rng
        shared = (rng.randrange(7, 9),) * rng.choice([0, 8, 20, 40, 80])
        prompt = (*shared, *(rng.randrange(3) for _ in range(rng.choice([1, 3, 9, 60]))))
        key = rng.choice([None, None, "session"])
        return GenerateRequest(
            f"r{number}", prompt, SamplingParams(rng.choice([1, 20, 400])), rng.choice(list(Band)), rng.choice("abc"),
            affinity_key=key,
        )  # fmt: skip

    def end_one(self) -> None:
        """End a request that was dispatched."""
        placed = [entry for entry in self.asked if entry[1].done()]
        if placed:
            request, task = self.rng.choice(placed)
            self.asked.remove((request, task))
            self.flow.settle(task.result(), request, self.rng.randrange(9))

    async def play(self) -> Counter[Reason]:
        """Play random changes and arrivals; return the reasons of the choices."""
        for number in range(_NUM_CHANGES):
            self.change()
            if self.rng.random() < 0.7:
                request = self.request(number)
                index = self.flow.admit(request, None)
                placement = self.flow.acquire(request, index, None, SampleGroup(), Timeline(0.0))
                self.asked.append((request, asyncio.create_task(placement)))
            else:
                self.end_one()
            await asyncio.sleep(0)
            self.flow.notify()
            await asyncio.sleep(0)
        self.table.check_invariants()
        self.flow.capacity.check_invariants()
        for _, task in self.asked:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.asked), return_exceptions=True)
        return Counter(self.flow.observer.decisions)


async def play_all(seeds: Seeds) -> None:
    reasons: Counter[Reason] = Counter()
    for seed in seeds:
        reasons += await World(seed).play()
    if seeds.are_many:
        expected = set(Reason) - {Reason.SAME_PROMPT, Reason.ROUND_ROBIN}
        assert reasons.keys() == expected, "the worlds show every reason"


@pytest.mark.random_worlds(300, per_call=150)
async def test_every_choice_is_that_of_the_reference(seeds: Seeds) -> None:
    await play_all(seeds)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(100))
async def test_every_choice_is_that_of_the_reference_in_100_000_worlds(part: int) -> None:
    for seed in range(1000 * part, 1000 * (part + 1)):
        await World(seed).play()


def test_replicas_that_came_and_went_are_forgotten_by_indexes_that_are_not_asked() -> None:
    table = LoadTable(FakeClock())
    rooms = CapacityIndex(table, LateBinding())
    index = rooms.of_band(Band.BATCH, is_starved=True)
    for number in range(1000):
        table.record(stats(f"replica-{number}"))
        table.forget(f"replica-{number}")
        rooms.trim()
        assert index.num_pending <= 64 + 2
    assert len(index) == 0
    rooms.check_invariants()
