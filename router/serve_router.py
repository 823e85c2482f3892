"""The Ray adapter of the router: obeys rankings, carries streams, turns Ray's errors into ours."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from ray.exceptions import RayActorError, RayError, RayTaskError
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

_RAY_ERRORS = (RayError, RayServeException, grpc.aio.AioRpcError)
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


class ServeReplicaClient:
    """Reaches the model replicas over a Serve deployment handle; see `router.types.ReplicaClient`."""

    def __init__(self, handle: DeploymentHandle[Any], poll_timeout_s: float = 2.0) -> None:
        """`poll_timeout_s` bounds every call but `generate`, seconds."""
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._describe = handle.options(method_name="describe")
        self._poll_timeout_s = poll_timeout_s

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request; closing the generator cancels it in the replica."""
        response = _in_own_context(self._generate.remote, request, ranking=ranking)
        try:
            async for delta in response:
                yield delta
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # Nobody cancelled us: the replica was told to give up the request, as when it is being stopped.
                raise ReplicaLost("the replica gave up the request", has_died=False) from None
            raise
        except _RAY_ERRORS as error:
            raise _as_serving_error(error) from error
        finally:
            response.cancel()

    async def poll_stats(self) -> list[ReplicaStats]:
        """The present load of every replica that answers."""
        return await self._ask_all("stats")

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Everything that every replica's engine counts."""
        return await self._ask_all("metrics")

    async def describe(self) -> ModelCard:
        """What the replicas serve, as any one of them says."""
        try:
            async with asyncio.timeout(self._poll_timeout_s):
                card: ModelCard = await _in_own_context(self._describe.remote)
        except TimeoutError:
            raise NoReplicaAvailable("no model replica has answered yet", code="model_loading") from None
        except _RAY_ERRORS as error:
            raise _as_serving_error(error) from error
        return card

    async def _ask_all(self, method_name: str) -> list[Any]:
        """What each replica answers; those that fail are left out."""
        try:
            response = self._handle.broadcast(method_name)
            answers = await response.results_async(timeout_s=self._poll_timeout_s, return_exceptions=True)
        except DeploymentUnavailableError:
            return []  # Serve's word for: there is no running replica
        except TimeoutError:
            raise ReplicaLost(f"a model replica did not answer `{method_name}` in {self._poll_timeout_s} s") from None
        except _RAY_ERRORS as error:
            raise _as_serving_error(error) from error
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _in_own_context(call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Make a handle call that Serve does not take for a part of the HTTP request being served.

    Calls made for one HTTP request share its internal id, and Serve's router (2.60) finds a waiting
    call by that id alone: of several concurrent ones all but one would wait for ever, at full speed.
    """
    return contextvars.Context().run(call, *args, **kwargs)


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
