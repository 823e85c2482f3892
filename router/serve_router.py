"""Ray adapter of the router: follows rankings, carries streams, translates Ray's errors into `ServingError`s."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Callable, Sequence
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

from replicas.errors import NoReplicaAvailable, Overloaded, ReplicaLost, ServingError, as_serving_error, is_cancelled
from replicas.protocol import EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta
from replicas.transport.wire import ChannelId, DeltaBatch, NumberedRequest, StreamFailure, decoded
from router.scaling.ingress_reports import IngressGossip, PollReply
from router.transport.channel_pool import ChannelPool

_WAKE_S = 1.0
_CALL_LIMIT_S = 2.0
"""Limit of every call but `submit` and `read`, which last as long as their streams; seconds."""
HANDLE_ERRORS = (RayError, RayServeException, grpc.aio.AioRpcError)
"""Errors that a handle call may raise; the last only where Serve carries calls over gRPC (the throughput profile)."""


class RankedRouter(RequestRouter):
    """Request router of Serve that tries replicas in the order of the call's `ranking` argument, one at a time.

    A replica id is the `unique_id` of Serve's replica id. Replicas that are not in the ranking form one last rank, from
    which Serve chooses by queue length. A call without a ranking has only that rank.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas, best first."""
        ranking = pending_request.kwargs.get("ranking", ()) if pending_request is not None else ()
        unranked = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranks = [[unranked.pop(replica_id)] for replica_id in ranking if replica_id in unranked]
        return [*ranks, list(unranked.values())] if unranked else ranks


class ServeTransport:
    """Calls of a channel pool over a Serve deployment handle; implements `ChannelTransport` of `router.transport`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._submit = handle.options(method_name="submit", stream=True)
        self._read = handle.options(method_name="read", stream=True)
        self._abort = handle.options(method_name="abort")
        self._acknowledge = handle.options(method_name="acknowledge")

    def submit(
        self, requests: Sequence[NumberedRequest], ranking: list[str], channel_id: ChannelId
    ) -> AsyncGenerator[str | StreamFailure, None]:
        """Have a replica generate requests; yield its id, then the streams that fail. Closing it cancels the call."""
        return _results(self._submit.remote, requests, channel_id, ranking=ranking)

    async def abort(self, replica_id: str, channel_id: ChannelId, numbers: Sequence[int]) -> None:
        """Abort streams of a channel.

        Raises:
            ServingError: the replica did not answer.
        """
        if not await _ask(self._abort, replica_id, replica_id, channel_id, numbers):
            raise NoReplicaAvailable(f"another replica answered in the place of {replica_id}")

    async def acknowledge(self, replica_id: str, channel_id: ChannelId, num_batches: int) -> None:
        """Tell a replica that the first `num_batches` of a channel have been read.

        Raises:
            ServingError: the replica did not answer.
        """
        if not await _ask(self._acknowledge, replica_id, replica_id, channel_id, num_batches):
            raise NoReplicaAvailable(f"another replica answered in the place of {replica_id}")

    async def read(self, replica_id: str, channel_id: ChannelId) -> AsyncGenerator[DeltaBatch, None]:
        """Yield the deltas of a channel; ends at once if another replica answers in the place of the one meant."""
        async with contextlib.aclosing(
            _results(self._read.remote, replica_id, channel_id, ranking=[replica_id])
        ) as messages:
            async for message in messages:
                yield decoded(message)


class ServeReplicaClient:
    """Client of the model replicas over a Serve deployment handle; implements `router.types.ReplicaClient`.

    Polls carry the gossip between ingresses.

    A replica that no longer answers polls while its streams go on is being stopped: Serve has removed it from its list
    of replicas. The client then reports it as draining, and its end does not count as a death.
    """

    def __init__(self, handle: DeploymentHandle[Any], gossip: IngressGossip) -> None:
        self._handle = handle
        self._gossip = gossip
        self._channels = ChannelPool(
            gossip.ingress_id, ServeTransport(handle), lambda replica_id: replica_id in self._missed
        )
        self._describe = handle.options(method_name="describe")
        self._poll = handle.options(method_name="poll")
        self._drain = handle.options(method_name="drain")
        self._probe: asyncio.Task[list[PollReply]] | None = None
        """Broadcast of a poll beside a replica that hangs; None: the last broadcast was answered."""
        self._missed: set[str] = set()
        """Replicas with open streams of this client that answered an earlier poll but not the last one."""

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request. Closing the generator cancels the request in the replica."""
        return self._channels.generate(request, ranking)

    def close(self) -> None:
        """Close the channels to the replicas that are idle."""
        self._channels.close()

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the present load of every replica that answers, and send each one this ingress's report."""
        replies = await self._poll_all()
        before = self._missed.union(stats.replica_id for stats in self._gossip.polled)
        polled = [reply.stats for reply in replies]
        self._missed = before.difference(stats.replica_id for stats in polled) & self._channels.serving()
        newest = {report.ingress_id: report for reply in replies for report in reply.peer_reports}
        self._gossip.polled, self._gossip.peer_reports = polled, list(newest.values())
        return polled

    async def wake(self) -> None:
        """Have a replica started where there is none, by a call that waits for one for at most 1 s."""
        with contextlib.suppress(TimeoutError, ServingError):
            async with asyncio.timeout(_WAKE_S):
                await _result(self._describe.remote)

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return everything that every replica's engine counts."""
        return await self._broadcast("metrics")

    async def drain(self, replica_id: str) -> bool:
        """Have a replica refuse new requests; return False if it is not running.

        Raises:
            ServingError: the replica did not answer.
        """
        # Serve may pass by the replica, which then is not the one that answers.
        return bool(await _ask(self._drain, replica_id, replica_id))

    async def describe(self) -> ModelCard:
        """Return the model description of any one replica. Does not have a replica started where there is none.

        Raises:
            ServingError: no replica is running, or the call failed.
        """
        answered: list[str] = []
        with contextlib.suppress(ReplicaLost):
            answered = [stats.replica_id for stats in await self.poll_stats()]
            if not answered:
                raise NoReplicaAvailable("no model replica is running yet", code="model_loading")
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                # Ask one that has answered: another one may hang.
                card: ModelCard = await _result(self._describe.remote, ranking=answered)
        except TimeoutError:
            raise NoReplicaAvailable("no model replica has answered yet", code="model_loading") from None
        return card

    async def _poll_all(self) -> list[PollReply]:
        """Return the replies of all replicas; beside a replica that hangs, those of the others.

        A replica that hangs fails the whole broadcast until Serve removes it. Then the known replicas are polled one by
        one, while a broadcast in the background finds out when all answer again.
        """
        if self._probe is None:
            try:
                return await self._broadcast("poll", self._gossip.own)
            except ReplicaLost as error:
                lost = error
        else:
            lost = ReplicaLost("no model replica answers")
        replies = await self._poll_known()
        if self._probe is not None and self._probe.done():
            done, self._probe = self._probe, None
            if done.exception() is None:
                return done.result()
        if self._probe is None:
            self._probe = asyncio.create_task(self._broadcast("poll", self._gossip.own))
        if not replies:
            raise lost
        return replies

    async def _poll_known(self) -> list[PollReply]:
        asked = await asyncio.gather(*(self._poll_one(stats.replica_id) for stats in self._gossip.polled))
        return list({reply.stats.replica_id: reply for reply in asked if reply is not None}.values())

    async def _poll_one(self, replica_id: str) -> PollReply | None:
        """Return the poll reply of one replica, or of another one in its place; None if there is no reply in time."""
        with contextlib.suppress(ServingError):
            reply: PollReply = await _ask(self._poll, replica_id, self._gossip.own)
            return reply
        return None

    async def _broadcast(self, method_name: str, *args: object) -> list[Any]:
        """Return the reply of each replica; failed calls are left out.

        Raises:
            ServingError: the broadcast as a whole failed or took longer than the poll timeout.
        """
        try:
            response = self._handle.broadcast(method_name, *args)
            replies = await response.results_async(timeout_s=_CALL_LIMIT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []  # Serve raises this when no replica is running.
        except TimeoutError:
            raise ReplicaLost(f"a model replica did not answer `{method_name}` in {_CALL_LIMIT_S} s") from None
        except HANDLE_ERRORS as error:
            raise _as_serving_error(error) from error
        return [reply for reply in replies if not isinstance(reply, BaseException)]


async def _ask(method: DeploymentHandle[Any], replica_id: str, *args: object) -> Any:
    """Return the answer of one replica, or of another one in its place.

    Raises:
        ServingError: it did not answer.
    """
    try:
        async with asyncio.timeout(_CALL_LIMIT_S):
            return await _result(method.remote, *args, ranking=[replica_id])
    except TimeoutError:
        raise NoReplicaAvailable(f"replica {replica_id} has not answered in {_CALL_LIMIT_S} s") from None


async def _result(call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Return the result of a handle call.

    Raises:
        ServingError: the call failed, or the replica gave it up.
    """
    try:
        return await in_own_context(call, *args, **kwargs)
    except asyncio.CancelledError:
        if not is_cancelled():
            raise ReplicaLost("the replica gave up the call", has_died=False) from None
        raise
    except HANDLE_ERRORS as error:
        raise _as_serving_error(error) from error


async def _results(call: Callable[..., Any], *args: object, **kwargs: object) -> AsyncGenerator[Any, None]:
    """Yield the results of a streamed handle call. Closing the generator cancels the call.

    The call is cancelled, and never a task that waits for its next result: gRPC (1.85) would not free what it has
    allocated for that wait.

    Raises:
        ServingError: the call failed, or the replica gave it up.
    """
    response = in_own_context(call, *args, **kwargs)
    try:
        while True:
            waiting = asyncio.create_task(response.__anext__())
            waiting.add_done_callback(_retrieve_error)
            yield await asyncio.shield(waiting)
    except StopAsyncIteration:
        return
    except asyncio.CancelledError:
        if not is_cancelled():
            raise ReplicaLost("the replica gave up the request", has_died=False) from None
        raise
    except HANDLE_ERRORS as error:
        raise _as_serving_error(error) from error
    finally:
        response.cancel()


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task that may have nobody who waits for it: asyncio would log it."""
    if not task.cancelled():
        task.exception()


def in_own_context(call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Make a handle call in an empty context, so that Serve does not link it to the HTTP request being served.

    Calls made for one HTTP request share its internal id, and Serve's router (2.60) finds a waiting call by that id
    alone. Of several concurrent calls all but one would busy-wait for ever.
    """
    return contextvars.Context().run(call, *args, **kwargs)


def _as_serving_error(error: Exception) -> ServingError:
    """Translate an error of Ray's into a `ServingError`; a `ServingError` that the replica raised is unwrapped.

    Every other error counts as the replica's death, a broken connection too. It cannot be told from one: over gRPC, and
    as Ray's `ActorUnavailableError`, it is the first that an ingress sees of a process that was killed. If it did not
    count, a request that kills its replicas could go on to the next one each time.
    """
    if isinstance(error, RayTaskError):
        return as_serving_error(error.cause)
    if isinstance(error, BackPressureError):
        return Overloaded("too many requests wait for a model replica", retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, DeploymentUnavailableError):
        return NoReplicaAvailable("no model replica is running")
    if isinstance(error, RayActorError | ReplicaUnavailableError):
        return ReplicaLost("the model replica that served the request died")
    return ReplicaLost(f"the model replica cannot be reached: {type(error).__name__}")
