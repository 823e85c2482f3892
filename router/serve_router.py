"""The Ray adapter of the router: obeys rankings, carries streams, turns Ray's errors into ours."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import grpc
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import AutoscalingContext
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from replicas.errors import NoReplicaAvailable, Overloaded, ReplicaLost, SequenceFailed, ServingError
from replicas.protocol import EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta
from router.held_work import DESIRED_REPLICAS, MAX_REPORT_AGE_S, IngressGossip, PollAnswer

_WAKE_S = 1.0
HANDLE_ERRORS = (RayError, RayServeException, grpc.aio.AioRpcError)
"""What a handle call may raise; the last only where Serve carries calls over gRPC (the throughput profile)."""


class RankedRouter(RequestRouter):
    """Tries replicas in the order of the call's `ranking` argument, one at a time.

    A replica id is the `unique_id` of Serve's. Replicas that are not in the ranking come last, in
    one rank that Serve chooses from by queue length, as all do for a call without a ranking.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, best first."""
        ranking = pending_request.kwargs.get("ranking", ()) if pending_request is not None else ()
        unranked = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranks = [[unranked.pop(replica_id)] for replica_id in ranking if replica_id in unranked]
        return [*ranks, list(unranked.values())] if unranked else ranks


_MODEL_DEPLOYMENT = "Model"


def obey_model_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy of the model's deployment: as many replicas as the ingresses have told its replicas.

    Where nothing is known, as while there is no replica, the number stays as it is; from zero, a call that waits for
    a replica starts the first one.
    """
    asked = _desired_replicas([context])
    return context.target_num_replicas if asked is None else asked, {}


def obey_ingresses(contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, Any]]:
    """Autoscaling policy of the application: as many model replicas as the ingresses ask for.

    The other deployments stay as they are, and so does the model where no ingress has reported lately.
    """
    asked = _desired_replicas(contexts.values())
    models = [key for key, context in contexts.items() if context.deployment_name == _MODEL_DEPLOYMENT]
    return {} if asked is None else dict.fromkeys(models, asked), {}


def _desired_replicas(contexts: Iterable[AutoscalingContext]) -> int | None:
    """The most that any replica of any of these deployments has lately reported."""
    newest = [
        (context.current_time - series[-1].timestamp, int(series[-1].value))
        for context in contexts
        for series in context.raw_metrics.get(DESIRED_REPLICAS, {}).values()
        if series
    ]
    return max((number for age_s, number in newest if age_s <= MAX_REPORT_AGE_S), default=None)


class ServeReplicaClient:
    """Reaches the model replicas over a Serve deployment handle.

    See `router.types.ReplicaClient`. Polls carry the gossip between ingresses.

    A replica that polls no longer reach though its streams go on is being stopped: Serve has taken it from its list.
    It shows as draining then, and its end is no death.
    """

    def __init__(self, handle: DeploymentHandle[Any], gossip: IngressGossip, poll_timeout_s: float = 2.0) -> None:
        """`poll_timeout_s` bounds every call but `generate`, seconds."""
        self._handle = handle
        self._gossip = gossip
        self._generate = handle.options(method_name="generate", stream=True)
        self._describe = handle.options(method_name="describe")
        self._exchange = handle.options(method_name="exchange")
        self._poll_timeout_s = poll_timeout_s
        self._num_streams: Counter[str] = Counter()
        self._missed: set[str] = set()
        """Replicas with streams of ours that were in an earlier poll and not in the last one."""

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request; closing the generator cancels it in the replica."""
        response = in_own_context(self._generate.remote, request, ranking=ranking, ingress_id=self._gossip.ingress_id)
        replica_id: str | None = None
        is_stopping = False
        try:
            async for delta in response:
                if delta.stats is not None:
                    if replica_id is None:
                        replica_id = delta.stats.replica_id
                        self._num_streams[replica_id] += 1
                    is_stopping = replica_id in self._missed
                yield _as_draining(delta) if is_stopping else delta
        except asyncio.CancelledError:
            if not is_cancelled():
                raise ReplicaLost("the replica gave up the request", has_died=False) from None
            raise
        except HANDLE_ERRORS as error:
            lost = _as_serving_error(error)
            if is_stopping and isinstance(lost, ReplicaLost):
                raise ReplicaLost("the replica was stopped before the request ended", has_died=False) from error
            raise lost from error
        finally:
            if replica_id is not None:
                self._num_streams[replica_id] -= 1
            response.cancel()

    async def poll_stats(self) -> list[ReplicaStats]:
        """The present load of every replica that answers; each hears what this ingress holds."""
        answers = await self._exchange_with_all()
        before = self._missed.union(stats.replica_id for stats in self._gossip.polled)
        polled = [answer.stats for answer in answers]
        self._num_streams += Counter()  # drops those at zero
        self._missed = before.difference(stats.replica_id for stats in polled).intersection(self._num_streams)
        newest = {held.ingress_id: held for answer in answers for held in answer.held_elsewhere}
        self._gossip.polled, self._gossip.elsewhere = polled, list(newest.values())
        return polled

    async def wake(self) -> None:
        """Have a replica started where there is none: a call that waits for one does that, if only for a moment."""
        with contextlib.suppress(TimeoutError, *HANDLE_ERRORS):
            async with asyncio.timeout(_WAKE_S):
                await in_own_context(self._describe.remote)

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Everything that every replica's engine counts."""
        return await self._ask_all("metrics")

    async def describe(self) -> ModelCard:
        """What the replicas serve, as any one of them says; does not wake any where there are none."""
        with contextlib.suppress(ReplicaLost):
            if not await self.poll_stats():
                raise NoReplicaAvailable("no model replica is running yet", code="model_loading")
        try:
            async with asyncio.timeout(self._poll_timeout_s):
                card: ModelCard = await in_own_context(self._describe.remote)
        except TimeoutError:
            raise NoReplicaAvailable("no model replica has answered yet", code="model_loading") from None
        except HANDLE_ERRORS as error:
            raise _as_serving_error(error) from error
        return card

    async def _exchange_with_all(self) -> list[PollAnswer]:
        try:
            answers: list[PollAnswer] = await self._ask_all("exchange", self._gossip.own)
        except ReplicaLost:
            # One that hangs would hide all others until Serve has noticed it: those known are asked one by one.
            known = [stats.replica_id for stats in self._gossip.polled]
            asked = await asyncio.gather(*map(self._exchange_with, known))
            answers = list({answer.stats.replica_id: answer for answer in asked if answer is not None}.values())
            if not answers:
                raise
        return answers

    async def _exchange_with(self, replica_id: str) -> PollAnswer | None:
        """What one replica answers, or another one in its place; None if neither does."""
        with contextlib.suppress(TimeoutError, *HANDLE_ERRORS):
            async with asyncio.timeout(self._poll_timeout_s):
                answer: PollAnswer = await in_own_context(self._exchange.remote, self._gossip.own, ranking=[replica_id])
                return answer
        return None

    async def _ask_all(self, method_name: str, *args: object) -> list[Any]:
        """What each replica answers; those that fail are left out."""
        try:
            response = self._handle.broadcast(method_name, *args)
            answers = await response.results_async(timeout_s=self._poll_timeout_s, return_exceptions=True)
        except DeploymentUnavailableError:
            return []  # Serve's word for: there is no running replica
        except TimeoutError:
            raise ReplicaLost(f"a model replica did not answer `{method_name}` in {self._poll_timeout_s} s") from None
        except HANDLE_ERRORS as error:
            raise _as_serving_error(error) from error
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _as_draining(delta: TokenDelta) -> TokenDelta:
    return delta if delta.stats is None else replace(delta, stats=replace(delta.stats, is_draining=True))


def in_own_context(call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Make a handle call that Serve does not take for a part of the HTTP request being served.

    Calls made for one HTTP request share its internal id, and Serve's router (2.60) finds a waiting
    call by that id alone: of several concurrent ones all but one would wait for ever, at full speed.
    """
    return contextvars.Context().run(call, *args, **kwargs)


def is_cancelled() -> bool:
    """Whether the current task is being cancelled.

    If not, a CancelledError came from the replica: it gave up the call, as it does when it is being stopped.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _as_serving_error(error: Exception) -> ServingError:
    """Our word for an error of Ray's; an error that the replica raised itself is unwrapped."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, ServingError):
            return cause
        return SequenceFailed(f"the replica failed: {type(cause).__name__}: {cause}")
    if isinstance(error, BackPressureError):
        return Overloaded("too many requests wait for a model replica", retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, DeploymentUnavailableError):
        return NoReplicaAvailable("no model replica is running")
    if isinstance(error, RayActorError | ReplicaUnavailableError):
        return ReplicaLost("the model replica that served the request died")
    return ReplicaLost(f"the model replica cannot be reached: {type(error).__name__}")
