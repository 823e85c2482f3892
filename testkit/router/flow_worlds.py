"""A flow controller over a load table of reported replicas, and requests that ask it for a place."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from replicas.protocol import Band, GenerateRequest, ReplicaStats
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.flow.flow_control import FlowController, FlowLimits, SampleGroup
from router.flow.flow_queue import BandLimits
from router.flow.placements import Placement
from router.timeline import Timeline
from testkit.router.simulated_replicas import FakeObserver, request
from testkit.router.simulated_time import settle_down, simulated_clock


def limits(
    max_requests: int = 1000, max_tokens: int = 10**9, max_predicted_wait_s: float | None = None,
    max_tenant_share: float = 1.0, **changes: Any,
) -> FlowLimits:  # fmt: skip
    bands = {band: BandLimits(max_requests, max_tokens, max_predicted_wait_s, max_tenant_share) for band in Band}
    return FlowLimits(bands, **{"promote_after_s": 22.5, **changes})


@dataclass(eq=False)
class Asked:
    """Request that asked for a place, and the task that waits for it."""

    request: GenerateRequest
    arrival_index: int
    deadline_s: float | None
    task: asyncio.Task[Placement]

    @property
    def has_place(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    @property
    def is_promoted(self) -> bool:
        """True if it has a place that its band got because it had starved."""
        return self.has_place and self.task.result().is_promoted

    @property
    def replica_id(self) -> str:
        return self.task.result().in_flight.replica_id


class Flow:
    """Flow controller under test, over replicas that were reported; made inside the simulated loop."""

    def __init__(self, *reported: ReplicaStats, **of_limits: Any) -> None:
        self.clock = simulated_clock()
        self.table = LoadTable(self.clock)
        self.observer = FakeObserver()
        self.controller = FlowController(limits(**of_limits), self.table, LeastTokens(random.Random(0)), self.observer)
        self.num_asked = 0
        self.order: list[str] = []
        """Request ids in the order of their dispatch."""
        self.report(*reported)

    def report(self, *reported: ReplicaStats) -> None:
        """Record reports of replicas and notify the controller."""
        for report in reported:
            self.table.record(report)
        self.controller.notify()

    async def learn(self, *reported: ReplicaStats) -> None:
        """Record reports, and let the requests that find room go out."""
        self.report(*reported)
        await settle_down()

    def own_by_band(self, replica_id: str) -> tuple[int, ...]:
        """Return the number of requests that were sent to a replica and have not ended."""
        view = self.table.load_of(replica_id)
        return (0,) * len(Band) if view is None else view.own_by_band

    def ask(
        self, band: Band = Band.STANDARD, *, within_s: float | None = None, group: SampleGroup | None = None,
        **of_request: Any,
    ) -> Asked:  # fmt: skip
        """Ask for a place in a new task; the request is queued once the task has run."""
        self.num_asked += 1
        asked = request(f"{band.name.lower()}-{self.num_asked}", band=band, **of_request)
        deadline_s = None if within_s is None else self.clock.now + within_s
        arrival_index = self.controller.admit(asked, deadline_s)
        return self._wait(asked, arrival_index, deadline_s, group or SampleGroup())

    def ask_again(self, asked: Asked) -> Asked:
        """Ask for a place again after a dispatch, with the same arrival index and deadline."""
        return self._wait(asked.request, asked.arrival_index, asked.deadline_s, SampleGroup())

    async def ask_many(self, count: int, band: Band = Band.STANDARD, **of_request: Any) -> list[Asked]:
        asked = [self.ask(band, **of_request) for _ in range(count)]
        await settle_down()
        return asked

    async def ask_one(self, band: Band = Band.STANDARD, **of_request: Any) -> Asked:
        return (await self.ask_many(1, band, **of_request))[0]

    def settle(self, asked: Asked, num_output_tokens: int = 8) -> None:
        """End a request that has a place."""
        if num_output_tokens:
            self.controller.account.progressed(asked.task.result(), asked.request, num_output_tokens)
        self.controller.settle(asked.task.result(), asked.request, num_output_tokens)

    async def end(self, *ended: Asked) -> None:
        """End requests that have a place, each after the one before it has made room."""
        for asked in ended:
            self.settle(asked)
            await settle_down()

    def refuse(self, asked: Asked) -> None:
        """Refuse a dispatched request, as a replica without room does."""
        self.controller.refused(asked.task.result(), asked.request)
        self.settle(asked, 0)

    def _wait(self, of: GenerateRequest, arrival_index: int, deadline_s: float | None, group: SampleGroup) -> Asked:
        return Asked(
            of, arrival_index, deadline_s, asyncio.create_task(self._acquire(of, arrival_index, deadline_s, group))
        )

    async def _acquire(
        self, of: GenerateRequest, arrival_index: int, deadline_s: float | None, group: SampleGroup
    ) -> Placement:
        placement = await self.controller.acquire(of, arrival_index, deadline_s, group, Timeline(self.clock.now))
        self.order.append(of.request_id)
        return placement

    def in_flight(self) -> dict[str, int]:
        return {view.stats.replica_id: view.num_in_flight for view in self.table.views()}

    def check_idle(self) -> None:
        """Check that nothing waits and that all counts are zero."""
        self.table.check_invariants()
        assert len(self.controller.queue) == 0 and not self.controller._pending
        assert not self.table._own
