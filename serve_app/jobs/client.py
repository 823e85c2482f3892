"""Client and server side of the ingresses' calls to the jobs deployment, over Serve's deployment handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from replicas.errors import NoReplicaAvailable, ServingError, is_cancelled
from replicas.protocol import Metric, MetricKind
from router.serve_router import HANDLE_ERRORS, in_own_context
from serve_app.jobs.api.errors import BatchNotCancellable, UnknownConversation, UnknownFile, UnknownResponse
from serve_app.jobs.api.records import JobsCounts, JsonObject

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_PAUSE_S = 0.2
"""Seconds between a lost call and the next attempt."""
_ALL_LIMIT_S = 1.0
"""Limit of a call to all workers, seconds."""
_DELETIONS = frozenset({"delete_file", "delete_response", "delete_conversation"})
"""Methods that raise for what is gone; after a lost call this is what they deleted."""
_LEAST_TELLING = "cancelled"
"""Status of a line in a worker that has given it up; another one may run it, or have run it."""


_signature: Callable[[Any], Signature] = cache(signature)


class _CallLost(Exception):
    """Missing answer to a call. The method may or may not have run."""


class ServeJobs:
    """Client of the jobs deployment that implements `JobsClient`.

    Any worker answers, since the state is in the database. All are asked for what each keeps for itself: its metrics,
    and the timelines of the lines that it runs.

    A call is repeated until its time limit while a worker dies before it answers. Every method is idempotent: a batch
    is submitted with its id, and a second deletion or cancellation changes nothing.
    """

    def __init__(self, handle: DeploymentHandle[Any], limit_s: float = 30.0) -> None:
        """`limit_s`: seconds that a call may take with its repetitions; `wait` adds its own timeout."""
        self._handle = handle
        self._limit_s = limit_s

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[ResultT]], *args: P.args, **arguments: P.kwargs
    ) -> ResultT:
        """Call a method of `JobsService` or `ResponsesService` and return its answer.

        Raises:
            ServingError: the method raised it, or it failed.
            NoReplicaAvailable: no answer within the limit.
        """
        named = _signature(method).bind(None, *args, **arguments).arguments
        del named["self"]
        merge = _OF_ALL_WORKERS.get(method.__name__)
        answer: ResultT
        if merge is None:
            answer = await self._repeat(method.__name__, named)
        else:
            answer = merge(await self._ask_all(method.__name__, named))
        return answer

    async def _ask_all(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Ask every worker, and return the answers; of any one worker where one of them hangs or is starting."""
        try:
            response = in_own_context(self._handle.broadcast, "call", name, arguments)
            answers = await response.results_async(timeout_s=_ALL_LIMIT_S, return_exceptions=True)
        except (TimeoutError, *HANDLE_ERRORS):
            answers = []
        answered = [answer for answer in answers if not isinstance(answer, BaseException)]
        return answered or [await self._repeat(name, arguments)]

    async def _repeat(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call until an answer comes. An error that a lost call's own work explains is none.

        Raises:
            NoReplicaAvailable: no answer within the limit.
        """
        timeout_s = arguments.get("timeout_s", 0.0)
        end_s, was_lost = time.monotonic() + timeout_s, False
        try:
            async with asyncio.timeout(self._limit_s + timeout_s):
                while True:
                    if timeout_s:
                        arguments = {**arguments, "timeout_s": max(0.0, end_s - time.monotonic())}
                    try:
                        return await self._call(name, arguments)
                    except _CallLost:
                        was_lost = True
                        await asyncio.sleep(_PAUSE_S)
                    except (UnknownFile, UnknownResponse, UnknownConversation):
                        if name not in _DELETIONS or not was_lost:
                            raise
                        return None
                    except BatchNotCancellable:
                        if not was_lost:
                            raise
                        name = "batch"
        except TimeoutError:
            raise NoReplicaAvailable("the jobs process does not answer", retry_after_s=5.0) from None

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a method of the service once.

        Raises:
            ServingError: the method raised it, or it failed.
            _CallLost: the process died, is stopping, or has not started.
        """
        response = in_own_context(self._handle.call.remote, name, arguments)
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()  # cancelling the task that awaits a call does not cancel the call
            if is_cancelled():
                raise
            raise _CallLost from None
        except RayTaskError as error:
            raise _failure() from error
        except HANDLE_ERRORS as error:
            raise _CallLost from error
        except Exception as error:  # over gRPC the method's error arrives without a RayTaskError around it
            raise _failure() from error
        if isinstance(answer, ServingError):
            raise answer
        return answer


def _most_telling(lines: Sequence[JsonObject | None]) -> JsonObject | None:
    """Return the object of a line from the worker that runs it, else from one that has not given it up."""
    known = [line for line in lines if line is not None]
    return min(known, key=lambda line: (line["status"] == _LEAST_TELLING, line["status"] != "running"), default=None)


def _total(counts: Sequence[JobsCounts]) -> JobsCounts:
    router = (family for one in counts for family in one.router)
    running = next((one.running for one in counts if one.running), ())
    stored = next((one.stored for one in counts if one.stored is not None), None)
    return JobsCounts(_of_all_workers([one.own for one in counts]), tuple(router), running, stored)


def _of_all_workers(metrics: Sequence[Sequence[Metric]]) -> tuple[Metric, ...]:
    """Return the metrics of all workers as one: counters are added up.

    Gauges are about the database, and equal but for the moment. The state of the storage is the worst that one finds.
    """
    merged: dict[tuple[object, ...], Metric] = {}
    for metric in (metric for of_worker in metrics for metric in of_worker):
        key = (metric.name, metric.labels)
        known = merged.setdefault(key, metric)
        if known is metric:
            continue
        if metric.kind is MetricKind.COUNTER:
            merged[key] = replace(known, value=known.value + metric.value)
        else:
            merged[key] = min(known, metric, key=lambda one: one.value)
    return tuple(merged.values())


def _failure() -> ServingError:
    """Return the error for a method that failed.

    It omits the cause, which may contain private data. The jobs process logs the cause.
    """
    return ServingError("the jobs process failed; its log says why")


async def answer(service: object, name: str, arguments: dict[str, Any]) -> object:
    """Return what a method of `JobsService` returns, or its error: if it were raised, Serve would log it as a fault."""
    try:
        return await getattr(service, name)(**arguments)
    except ServingError as error:
        return error


_OF_ALL_WORKERS: Mapping[str, Callable[[Any], Any]] = {"line_request": _most_telling, "metrics": _total}
"""Methods that all workers are asked for, and what makes one answer of theirs."""
