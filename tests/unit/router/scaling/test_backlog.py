"""Backlog outside flow control counts in autoscaling as if it waited in the queue."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.flow.flow_queue import BandLimits, FlowQueue
from router.scaling.autoscaling import Autoscaler, AutoscalingSettings, DownscaleDelay, ReplicaBounds
from router.scaling.autoscaling_loop import AutoscalingLoop, BacklogWork, IngressLoad, work_in_backlog
from router.scaling.ingress_reports import IngressGossip, IngressReport, PendingWork
from testkit.router.simulated_replicas import stats
from testkit.router.simulated_time import FakeClock

NOW = 1_000_000.0
SPEED = 100.0
SETTINGS = AutoscalingSettings(
    replica_tokens_per_s=SPEED,
    downscale_delay_s=DownscaleDelay(0.0, 0.0),
)  # fmt: skip


@dataclass
class Lines:
    """Lines that a jobs process holds back."""

    waiting: list[BacklogWork] = field(default_factory=list)

    def num_requests(self) -> int:
        return len(self.waiting)

    def work(self) -> Sequence[BacklogWork]:
        return self.waiting


class Scaled:
    """An autoscaling loop of a jobs process, and everything around it."""

    def __init__(self) -> None:
        self.clock, self.lines, self.gossip = FakeClock(), Lines(), IngressGossip("jobs")
        self.has_woken = asyncio.Event()
        self.table = LoadTable(self.clock)
        queue = FlowQueue({band: BandLimits(10, 10**6) for band in Band}, 30.0)
        autoscaler = Autoscaler(SETTINGS, ReplicaBounds(0, 10, 1), self.clock)
        load = IngressLoad(queue, self.table, self.gossip, self.lines, lambda: NOW)
        self.loop = AutoscalingLoop(autoscaler, load, self.gossip, self.wake)

    async def wake(self) -> None:
        self.has_woken.set()

    def desired(self) -> int:
        return self.loop.decide().desired_replicas


@pytest.mark.parametrize(
    ("band", "left_s", "due_s"),
    [
        (Band.BATCH, None, 86_400.0),
        (Band.BATCH, 160.0, 128.0),  # 0.8 of it
        (Band.BATCH, 0.5, 2.0),
        (Band.BATCH, -5.0, 2.0),
        (Band.STANDARD, None, 2.0),
        (Band.INTERACTIVE, 160.0, 2.0),
    ],
)
def test_backlog_work_is_due_by_its_band_and_deadline(band, left_s, due_s):
    waiting = BacklogWork(band, 500, None if left_s is None else NOW + left_s)
    assert work_in_backlog([waiting, waiting], SETTINGS, NOW) == (PendingWork(1000, due_s),)


def test_backlog_work_asks_for_replicas_in_the_gossip():
    scaled = Scaled()
    scaled.table.record(stats("replica"))
    assert scaled.desired() == 1
    scaled.lines.waiting = [BacklogWork(Band.BATCH, 64_000, NOW + 160.0)]
    assert scaled.desired() == 5
    assert scaled.gossip.own == IngressReport("jobs", (PendingWork(64_000, 128.0),), num_requests=1, desired_replicas=5)


def test_a_batch_without_a_near_deadline_keeps_one_replica():
    scaled = Scaled()
    scaled.table.record(stats("replica"))
    scaled.lines.waiting = [BacklogWork(Band.BATCH, 1_000_000, None)]
    scaled.clock.now += 1000.0
    assert scaled.desired() == 1
    scaled.lines.waiting = []
    scaled.clock.now += 1000.0
    assert scaled.desired() == 0


async def test_backlog_work_wakes_a_deployment_at_zero_replicas():
    scaled = Scaled()
    scaled.table.record(stats("replica"))
    scaled.desired()
    scaled.table.forget("replica")
    scaled.lines.waiting = [BacklogWork(Band.BATCH, 10, None)]
    running = asyncio.create_task(scaled.loop.run(lambda: asyncio.sleep(0)))
    async with asyncio.timeout(10.0):
        await scaled.has_woken.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
