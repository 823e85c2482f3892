"""Fakes with behaviour: replicas with a deterministic model, their client, and an observer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from replicas.engine.sequence import Phase, PhaseTimes
from replicas.errors import EngineDead, NoReplicaAvailable, Overloaded, ReplicaLost, ServingError
from replicas.protocol import (
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    IngressShare,
    ModelCard,
    PositionLogprobs,
    ReplicaStats,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from router.types import Outcome, Reason, ReplicaView, RoutingRequest
from testkit.router.simulated_time import simulated_clock

BLOCK_SIZE = 4
_VOCABULARY = 97
_EOS = 0


def stats(
    replica_id: str = "a", *, taken: float = 0.0, running: Sequence[int] = (0, 0, 0),
    waiting: Sequence[int] = (0, 0, 0), slots: int = 4, free_blocks: int = 1000, held: Sequence[int] = (0, 0, 0),
    outstanding: int = 0, rate: float = 0.0, is_draining: bool = False, weights: str = "",
    own: Sequence[int] = (), own_tokens: int = 0, by_ingress: Sequence[IngressShare] = (),
) -> ReplicaStats:  # fmt: skip
    """Return a report of a replica with a thousand blocks; counts are by band.

    `own` and `own_tokens` are the parts of `running` and `waiting` and of `outstanding` that an ingress without an id
    sent.
    """
    return ReplicaStats(
        replica_id=replica_id,
        node_id="node",
        pid=1,
        taken_unix_s=taken,
        num_slots=slots,
        num_blocks=1000,
        num_free_blocks=free_blocks,
        num_running_by_band=tuple(running),
        num_waiting_by_band=tuple(waiting),
        waiting_tokens=0,
        generated_tokens_per_s=0.0,
        is_draining=is_draining,
        num_held_blocks_by_band=tuple(held),
        outstanding_tokens=outstanding,
        by_ingress=(IngressShare("", tuple(own), own_tokens),) if own else tuple(by_ingress),
        saturated_tokens_per_s=rate,
        block_size=BLOCK_SIZE,
        weights_id=weights,
    )


def view(
    replica_id: str = "a", *, by_band: Sequence[int] = (0, 0, 0), outstanding: int = 0, unseen: int = 0,
    of: ReplicaStats | None = None,
) -> ReplicaView:  # fmt: skip
    """Return a policy's view of a replica."""
    return ReplicaView(
        replace(of or stats(), replica_id=replica_id), age_s=0.0, num_by_band=tuple(by_band),
        outstanding_tokens=outstanding, unseen_tokens=unseen,
    )  # fmt: skip


def request(
    request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, band: Band = Band.STANDARD,
    tenant: str = "t", deadline_unix_s: float | None = None, affinity_key: str | None = None, **params: object,
) -> GenerateRequest:  # fmt: skip
    sampling = SamplingParams(max_tokens, **params)  # type: ignore[arg-type]
    return GenerateRequest(
        request_id, prompt, sampling, band, tenant, deadline_unix_s=deadline_unix_s, affinity_key=affinity_key
    )


def routing(
    of: GenerateRequest | None = None, *, expected: int = 8, hashes: Sequence[bytes] = (), prompt_tokens: int = 3
) -> RoutingRequest:
    return RoutingRequest(of or request(prompt=tuple(range(1, prompt_tokens + 1))), expected, hashes)


@dataclass
class FakeObserver:
    """Observer that records every call."""

    waits: list[tuple[Band, Outcome, float]] = field(default_factory=list)
    decisions: list[Reason] = field(default_factory=list)
    promotions: list[Band] = field(default_factory=list)
    migrations: Counter[str] = field(default_factory=Counter)
    finishes: list[tuple[Band, float | None, float, int]] = field(default_factory=list)

    def waited(self, band: Band, outcome: Outcome, seconds: float) -> None:
        self.waits.append((band, outcome, seconds))

    def decided(self, reason: Reason) -> None:
        self.decisions.append(reason)

    def promoted(self, band: Band) -> None:
        self.promotions.append(band)

    def migrated(self, outcome: str) -> None:
        self.migrations[outcome] += 1

    def finished(
        self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int, auto_tpot_s: float | None = None
    ) -> None:
        self.finishes.append((band, ttft_s, duration_s, num_tokens))

    def outcomes(self) -> Counter[Outcome]:
        return Counter(outcome for _, outcome, _ in self.waits)


@dataclass(frozen=True)
class Generation:
    """Complete output of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def shown_text(token_ids: Sequence[int]) -> str:
    """Return one letter per token; an id divisible by 3 shows only with the next token, like half a character."""
    letters = "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)
    return letters[:-1] if token_ids and token_ids[-1] % 3 == 0 else letters


def undisturbed(of: GenerateRequest) -> Generation:
    """Return the deterministic model's output for a request; each token is a function of the prefix."""
    token_ids: list[int] = []
    while len(token_ids) < of.params.max_tokens:
        prefix = hash((of.params.seed, *of.prompt_token_ids, *token_ids))
        token_ids.append(prefix % _VOCABULARY)
        if token_ids[-1] == _EOS:
            break
    has_stopped = bool(token_ids) and token_ids[-1] == _EOS
    text = "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)
    return Generation(tuple(token_ids), text, FinishReason.STOP if has_stopped else FinishReason.LENGTH)


def prompt_logprobs(of: GenerateRequest) -> tuple[PositionLogprobs, ...]:
    """Return the scores of prompt tokens 1, 2, ..."""
    return tuple(
        PositionLogprobs(TokenLogprob(token_id, -float(index)), ())
        for index, token_id in enumerate(of.prompt_token_ids)
        if index
    )


@dataclass(eq=False)
class FakeReplica:
    """Replica that runs `num_slots` requests at a time, `tokens_per_delta` tokens each step.

    `die` and `stop` fail open streams at their next step. `drain` refuses new requests. While `is_hung`, neither
    streams nor polls are answered. A request that comes after a
    death was not on the replica when it died: a dead engine says so, and Serve passes by an actor that is dead.
    """

    replica_id: str
    num_slots: int = 4
    max_waiting: int = 64
    tokens_per_delta: int = 1
    scores_per_delta: int = 2
    step_s: float = 0.1
    carry_s: float = 0.0
    """Time that a delta takes to its reader."""
    preempts_after: int | None = None
    """Number of deltas after which a sequence is preempted, once; None: none is."""
    preempted_s: float = 0.0
    """Time for which a preempted sequence waits."""
    fails_in_delta: bool = True
    """True if a failure comes as a last delta, False if it is raised."""
    is_draining: bool = False
    is_hung: bool = False
    weights: str = ""
    death: ServingError | None = None
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    waiting: dict[str, GenerateRequest] = field(default_factory=dict)
    started: list[GenerateRequest] = field(default_factory=list)
    num_closed: int = 0

    def die(self, error: ServingError | None = None) -> None:
        self.death = error or ReplicaLost("the replica died")

    def stop(self) -> None:
        self.die(ReplicaLost("the replica was stopped", has_died=False))

    def drain(self) -> None:
        self.is_draining = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.started.append(request)
        try:
            async with aclosing(self._deltas(request)) as deltas:
                async for delta in deltas:
                    if self.carry_s:
                        await asyncio.sleep(self.carry_s)
                    yield delta
        except ServingError as error:
            if not self.fails_in_delta:
                raise
            num_had = len(request.output_token_ids)
            yield self._delta(request, num_had, num_had, FinishReason.ERROR, error=error)
        finally:
            self.running.pop(request.request_id, None)
            self.waiting.pop(request.request_id, None)
            self.num_closed += 1

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        phases, now = PhaseTimes(), simulated_clock()
        phases.begin(now())
        await self._wait_for_slot(request)
        phases.enter(Phase.PREFILL, now())
        scores = () if request.params.prompt_logprobs is None else prompt_logprobs(request)
        for start in range(0, len(scores), self.scores_per_delta):
            await self._step()
            at = len(request.output_token_ids)
            yield self._delta(request, at, at, scores=scores[start : start + self.scores_per_delta])
        whole, start = undisturbed(request), len(request.output_token_ids)
        assert request.output_token_ids == whole.token_ids[:start], "asked to go on behind another output"
        num_deltas = num_preemptions = 0
        while True:
            if num_deltas == self.preempts_after:
                num_preemptions = 1
                phases.enter(Phase.PREEMPTED, now())
                await asyncio.sleep(self.preempted_s)
                phases.enter(Phase.PREFILL, now())
            await self._step()
            num_deltas += 1
            if phases.phase is Phase.PREFILL:
                phases.enter(Phase.DECODE, now())
            end = min(start + self.tokens_per_delta, len(whole.token_ids))
            is_last = end == len(whole.token_ids)
            delta = self._delta(request, start, end, whole.finish_reason if is_last else None)
            if is_last or phases.has_news:
                delta = delta._replace(phases=phases.read(now(), num_preemptions))
            yield delta
            if is_last:
                return
            start = end

    async def _wait_for_slot(self, request: GenerateRequest) -> None:
        if isinstance(self.death, ReplicaLost | EngineDead):
            raise ReplicaLost(f"no new requests after {self.death}", has_died=False)
        self._check_alive()
        if self.is_draining:
            raise NoReplicaAvailable("this replica is draining", "draining")
        if len(self.running) >= self.num_slots and len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait; the limit is {self.max_waiting}")
        self.waiting[request.request_id] = request
        while len(self.running) >= self.num_slots:
            await self._step()
        self.running[request.request_id] = self.waiting.pop(request.request_id)

    async def _step(self) -> None:
        await asyncio.sleep(self.step_s)
        while self.is_hung:
            await asyncio.sleep(0.1)
        self._check_alive()

    def _check_alive(self) -> None:
        if self.death is not None:
            raise self.death

    def _delta(
        self, request: GenerateRequest, start: int, end: int, finish_reason: FinishReason | None = None,
        scores: tuple[PositionLogprobs, ...] = (), error: ServingError | None = None,
    ) -> TokenDelta:  # fmt: skip
        whole = undisturbed(request)
        shown = len(shown_text(whole.token_ids[:start]))
        text = whole.text[shown:] if finish_reason else shown_text(whole.token_ids[:end])[shown:]
        return TokenDelta(
            request_id=request.request_id,
            start=start,
            token_ids=whole.token_ids[start:end],
            text="" if error is not None else text,
            usage=Usage(len(request.prompt_token_ids), end, 0),
            prompt_logprobs=scores,
            finish_reason=finish_reason,
            error=error,
            stats=None if self.death is not None else self.stats(),
        )

    def stats(self) -> ReplicaStats:
        by_band = [
            [sum(r.band is band for r in requests.values()) for band in Band]
            for requests in (self.running, self.waiting)
        ]
        here = [*self.running.values(), *self.waiting.values()]
        by_ingress = [
            IngressShare(name, tuple([sum(r.ingress_id == name and r.band is band for r in here) for band in Band]), 0)
            for name in sorted({r.ingress_id for r in here})
        ]
        return stats(
            self.replica_id, taken=simulated_clock().unix(), running=by_band[0], waiting=by_band[1],
            slots=self.num_slots, is_draining=self.is_draining, weights=self.weights, by_ingress=by_ingress,
        )  # fmt: skip


@dataclass
class FakeClient:
    """`ReplicaClient` over fake replicas; the first existing replica of the ranking serves."""

    replicas: dict[str, FakeReplica] = field(default_factory=dict)
    poll_error: ServingError | None = None
    num_polls: int = 0
    rankings: list[list[str]] = field(default_factory=list)

    def add(self, replica: FakeReplica) -> FakeReplica:
        self.replicas[replica.replica_id] = replica
        return replica

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        self.rankings.append(ranking)
        there = [replica_id for replica_id in [*ranking, *self.replicas] if replica_id in self.replicas]
        if not there:
            raise NoReplicaAvailable("no model replica is running")
        async with aclosing(self.replicas[there[0]].generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def poll_stats(self) -> list[ReplicaStats]:
        self.num_polls += 1
        await asyncio.sleep(0)
        if self.poll_error is not None:
            raise self.poll_error
        return [replica.stats() for replica in self.replicas.values() if replica.death is None and not replica.is_hung]

    async def poll_metrics(self) -> list[EngineMetrics]:
        return [EngineMetrics(replica_id, (), ()) for replica_id in self.replicas]

    async def drain(self, replica_id: str) -> bool:
        self.replicas[replica_id].drain()
        return True

    async def describe(self) -> ModelCard:
        if not self.replicas:
            raise NoReplicaAvailable("none")
        return ModelCard("m", 64, _VOCABULARY, BLOCK_SIZE, 1000, 1000 * BLOCK_SIZE / 64, 4, "float32", "cpu")
