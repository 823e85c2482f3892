"""A dispatcher over fake replicas in simulated time, and the outcomes of its streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from replicas.errors import ServingError
from replicas.protocol import Band, FinishReason, GenerateRequest, PositionLogprobs, ReplicaStats, TokenDelta
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController, FlowLimits
from router.flow.flow_queue import BandLimits
from router.timeline import Timeline
from router.watch import WatchSettings
from testkit.router.simulated_replicas import FakeClient, FakeObserver, FakeReplica, prompt_logprobs, undisturbed
from testkit.router.simulated_time import simulated_clock

ROOMY = FlowLimits({band: BandLimits(10_000, 10**9) for band in Band}, promote_after_s=30.0)
_NUMBERS = count()
"""Numbers of the ingresses."""


@dataclass
class Outcome:
    """Collected deltas of one stream, or its error."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    scores: list[PositionLogprobs] = field(default_factory=list)
    error: ServingError | None = None
    timeline: Timeline | None = None

    def read(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta after the last"
        assert delta.error is None, "a failure is raised"
        assert delta.start == len(self.token_ids), "indices are contiguous"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.scores += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason

    def check(self, request: GenerateRequest) -> None:
        """Check that the stream equals that of an undisturbed request."""
        whole = undisturbed(request)
        assert self.error is None
        assert tuple(self.token_ids) == whole.token_ids
        assert self.text == whole.text
        assert self.finish_reason is whole.finish_reason
        if request.params.prompt_logprobs is not None:
            assert tuple(self.scores) == prompt_logprobs(request)


async def read(stream: AsyncGenerator[TokenDelta, None], timeline: Timeline | None = None) -> Outcome:
    """Read a stream to its end; a `ServingError` is part of the outcome."""
    outcome = Outcome(timeline=timeline)
    try:
        async for delta in stream:
            outcome.read(delta)
    except ServingError as error:
        assert outcome.finish_reason is None, "an error after the finish reason"
        outcome.error = error
    else:
        assert outcome.finish_reason is not None, "the stream just ended"
    return outcome


class World:
    """Dispatcher with all its parts over fake replicas; made inside the simulated loop."""

    def __init__(
        self,
        *replicas: FakeReplica,
        known: Iterable[ReplicaStats] = (),
        limits: FlowLimits = ROOMY,
        settings: WatchSettings | None = None,
    ) -> None:
        """Create the world; `known` are reports in its load table."""
        self.clock = simulated_clock()
        self.replicas = replicas
        self.client = FakeClient()
        for replica in replicas:
            self.client.add(replica)
        self.observer = FakeObserver()
        self.table = LoadTable(self.clock, f"ingress-{next(_NUMBERS)}")
        for report in known:
            self.table.record(report)
        self.flow = FlowController(limits, self.table, LeastTokens(random.Random(0)), self.observer)
        self.dispatcher = Dispatcher(self.client, self.flow, self.observer, settings, unix_clock=self.clock.unix)

    def stream(self, request: GenerateRequest, timeline: Timeline | None = None) -> AsyncGenerator[TokenDelta, None]:
        [stream] = self.dispatcher.streams([request], () if timeline is None else [timeline])
        return stream

    async def read_all(self, requests: Sequence[GenerateRequest]) -> list[Outcome]:
        """Read the streams of independent requests concurrently."""
        return await asyncio.gather(*(read(self.stream(request)) for request in requests))

    def in_flight(self) -> dict[str, int]:
        return {view.stats.replica_id: view.num_in_flight for view in self.dispatcher.load()}

    def check_idle(self) -> None:
        """Check that nothing waits and that all counts are zero."""
        self.table.check_invariants()
        assert not self.table._own
        assert len(self.flow.queue) == 0 and not self.flow._pending
        self.flow._waits.check_invariants()
        assert not self.flow._waits._turn_s
        assert all(self.flow.queue.num_tokens(band) == 0 for band in Band)
        assert all(not replica.running and not replica.waiting for replica in self.replicas)


MakeWorld = Callable[..., World]
"""Factory of worlds, with the arguments of `World` and `is_polled`."""
