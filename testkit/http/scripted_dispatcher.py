"""Fakes with behaviour: a replica that answers from a script, and a dispatcher in front of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from replicas.errors import ServingError
from replicas.protocol import (
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    ModelCard,
    PositionLogprobs,
    ReplicaStats,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from router.flow.flow_queue import BandQueueSize, TenantQueue
from router.timeline import Timeline
from router.types import Headroom, Reason, ReplicaView
from serve_app.keys.key_file import digest_of


@dataclass(frozen=True)
class ScriptedToken:
    """One output token, and the text that it adds."""

    token_id: int
    text: str


@dataclass
class FakeReplica:
    """Replica that answers every request with `script`, repeated as often as needed.

    Logprobs are a function of the position, so that tests can tell positions apart. A greedy request with the same
    prompt gets the same answer in every form of request.
    """

    script: Sequence[ScriptedToken]
    replica_id: str = "replica-a"
    tokens_per_delta: int = 1
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    fail_at: int | None = None
    """Index of the output token at which `error` is raised instead."""
    error: Exception = field(default_factory=lambda: ServingError("scripted failure"))
    fail_only: Callable[[GenerateRequest], bool] = lambda request: True
    first_token_gate: asyncio.Event | None = None
    gate_at: int | None = None
    """Index of the output token before which the replica waits for `gate`."""
    gate: asyncio.Event | None = None
    stops_at: int | None = None
    """Number of output tokens after which every sequence stops by itself, unless `max_tokens` is lower."""
    stop_reason: str | None = None
    """Stop string at which every sequence that stops by itself does so; None: at the end token."""
    cached_tokens: int = 0
    vocab_size: int = 320
    started: list[GenerateRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    num_deltas: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.started.append(request)
        self.running.add(request.request_id)
        try:
            async for delta in self._deltas(request):
                if delta.finish_reason is not None:
                    self.finished.append(request.request_id)
                yield delta
        finally:
            self.running.discard(request.request_id)
            if request.request_id not in self.finished:
                self.aborted.append(request.request_id)

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        if self.first_token_gate is not None:
            await self.first_token_gate.wait()
        await asyncio.sleep(self.ttft_s)
        num_tokens = request.params.max_tokens
        if self.stops_at is not None:
            num_tokens = min(num_tokens, self.stops_at)
        is_stopped = num_tokens < request.params.max_tokens
        if num_tokens == 0:
            yield self._delta(request, 0, 0, FinishReason.LENGTH)
        for start in range(0, num_tokens, self.tokens_per_delta):
            end = min(start + self.tokens_per_delta, num_tokens)
            if start:
                await asyncio.sleep(self.tpot_s)
            if self.gate is not None and self.gate_at is not None and start <= self.gate_at < end:
                await self.gate.wait()
            if self.fail_at is not None and start <= self.fail_at < end and self.fail_only(request):
                raise self.error
            reason = None
            if end == num_tokens:
                reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            yield self._delta(request, start, end, reason)

    def _delta(self, request: GenerateRequest, start: int, end: int, reason: FinishReason | None) -> TokenDelta:
        self.num_deltas += 1
        tokens = [self.script[index % len(self.script)] for index in range(start, end)]
        num_prompt = len(request.prompt_token_ids)
        params = request.params
        return TokenDelta(
            request_id=request.request_id,
            start=start,
            token_ids=tuple(token.token_id for token in tokens),
            text="".join(token.text for token in tokens),
            usage=Usage(num_prompt, end, self.cached_tokens, num_prompt - self.cached_tokens + end - 1),
            logprobs=()
            if params.logprobs is None
            else tuple(
                self._position(token.token_id, index, params.logprobs) for index, token in enumerate(tokens, start)
            ),
            prompt_logprobs=()
            if params.prompt_logprobs is None or start
            else tuple(
                self._position(token_id, index, params.prompt_logprobs)
                for index, token_id in enumerate(request.prompt_token_ids)
                if index
            ),
            finish_reason=reason,
            stop_reason=self.stop_reason if reason is FinishReason.STOP else None,
            stats=self.stats(),
        )

    def _position(self, token_id: int, index: int, num_top: int) -> PositionLogprobs:
        top = tuple(TokenLogprob((token_id + rank) % self.vocab_size, -0.5 - index - rank) for rank in range(num_top))
        return PositionLogprobs(TokenLogprob(token_id, -0.5 - index), top)

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            replica_id=self.replica_id,
            node_id="node-1",
            pid=4242,
            taken_unix_s=0.0,
            num_slots=8,
            num_blocks=100,
            num_free_blocks=75,
            num_running_by_band=(0, len(self.running), 0),
            num_waiting_by_band=(0, 0, 3),
            waiting_tokens=30,
            generated_tokens_per_s=12.5,
            is_draining=False,
        )


@dataclass
class FakeDispatcher:
    """Dispatcher over one replica; a test may replace any part of its answers."""

    replica: FakeReplica
    card: ModelCard | None
    views: list[ReplicaView] | None = None
    views_after_refresh: list[ReplicaView] | None = None
    engine_metrics: list[EngineMetrics] = field(default_factory=list)
    headrooms: Mapping[Band, Headroom] = field(
        default_factory=lambda: dict.fromkeys(Band, Headroom(10, 0, 1000, 0, wait_s=None))
    )
    error: ServingError | None = None
    """Error raised by every call that asks the replicas."""
    drained: list[str] = field(default_factory=list)
    queued: dict[Band, dict[str, TenantQueue]] = field(default_factory=dict)

    def streams(
        self, requests: Sequence[GenerateRequest], timelines: Sequence[Timeline] = ()
    ) -> list[AsyncGenerator[TokenDelta, None]]:
        timelines = timelines or [Timeline(time.monotonic()) for _ in requests]
        return [self._stream(request, timeline) for request, timeline in zip(requests, timelines, strict=True)]

    async def _stream(self, request: GenerateRequest, timeline: Timeline) -> AsyncGenerator[TokenDelta, None]:
        """Yield what the replica generates, and tell the timeline as the router's dispatcher does."""
        timeline.arrived(time.monotonic())
        timeline.waited(time.monotonic())
        timeline.placed(time.monotonic(), self.replica.replica_id, Reason.SINGLE_CANDIDATE)
        async with aclosing(self.replica.generate(request)) as deltas:
            async for delta in deltas:
                timeline.progressed(time.monotonic(), delta, self.replica.replica_id)
                yield delta

    def headroom(self, band: Band, tenant: str) -> Headroom:
        return self.headrooms[band]

    def waiting(self, band: Band, most: int) -> BandQueueSize:
        tenants = self.queued.get(band, {})
        longest = sorted(tenants.items(), key=lambda item: -item[1].num_requests)
        num_requests = sum(queue.num_requests for queue in tenants.values())
        num_tokens = sum(queue.num_tokens for queue in tenants.values())
        return BandQueueSize(num_requests, num_tokens, len(tenants), dict(longest[:most]))

    def load(self) -> list[ReplicaView]:
        if self.views is not None:
            return self.views
        return [ReplicaView(self.replica.stats(), age_s=0.25, own_by_band=(0, len(self.replica.running), 0))]

    async def refresh(self) -> None:
        self._raise()
        self.views = self.views_after_refresh

    async def drain(self, replica_id: str) -> bool:
        self._raise()
        self.drained.append(replica_id)
        return replica_id in {view.stats.replica_id for view in self.load()}

    async def metrics(self) -> list[EngineMetrics]:
        self._raise()
        return self.engine_metrics

    async def model_card(self) -> ModelCard:
        self._raise()
        assert self.card is not None
        return self.card

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


def write_keys(folder: Path, *tenants: str, operator: str | None = None) -> str:
    """Write a key file in which each tenant's name is its key, and return its path; `operator` is an operator, too."""
    path = folder / "keys.yaml"
    owners = {digest_of(name): {"tenant": name, "operator": name == operator} for name in tenants}
    path.write_text(json.dumps(owners))
    return str(path)
