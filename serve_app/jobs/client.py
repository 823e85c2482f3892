"""Client and server side of the ingresses' calls to the jobs deployment, over Serve's deployment handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from replicas.errors import NoReplicaAvailable, ServingError, is_cancelled
from replicas.protocol import Metric, MetricKind
from router.serve_router import HANDLE_ERRORS, in_own_context
from serve_app.jobs.api.errors import BatchNotCancellable, UnknownFile
from serve_app.jobs.api.records import (
    BatchKind,
    BatchRecord,
    BatchStats,
    FileRecord,
    JobsCounts,
    JobsService,
    JsonObject,
    LineRecord,
    NewBatch,
    Page,
    PageRequest,
    Submission,
    new_batch_id,
)
from serve_app.jobs.api.usage import UsagePage, UsageQuery, UsageReport

DeploymentT = TypeVar("DeploymentT")
ResultT = TypeVar("ResultT")

_PAUSE_S = 0.2
"""Seconds between a lost call and the next attempt."""
_ALL_LIMIT_S = 1.0
"""Limit of a call to all workers, seconds."""
_LEAST_TELLING = "cancelled"
"""Status of a line in a worker that has given it up; another one may run it, or have run it."""


class _CallLost(Exception):
    """Missing answer to a call. The method may or may not have run."""


class ServeJobs:
    """Client of the jobs deployment that implements `JobsService`.

    Any worker answers, since the state is in the database. All are asked for what each keeps for itself: its metrics,
    and the timelines of the lines that it runs.

    A call is repeated until its time limit while a worker dies before it answers. Every method is idempotent:
    a new batch is submitted with its id, and a second deletion or cancellation changes nothing.
    """

    def __init__(self, handle: DeploymentHandle[Any], limit_s: float = 30.0) -> None:
        """`limit_s`: seconds that a call may take with its repetitions; `wait` adds its own timeout."""
        self._handle = handle
        self._limit_s = limit_s

    async def add_file(self, file: FileRecord) -> None:
        """Record a file whose bytes are complete in the store."""
        await self._ask(JobsService.add_file, file=file)

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file that has not expired."""
        return await self._ask(JobsService.file, tenant=tenant, file_id=file_id)

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Return a page of the tenant's files."""
        return await self._ask(JobsService.files, tenant=tenant, purpose=purpose, page=page)

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file's record and its bytes."""
        call = partial(self._call, JobsService.delete_file, tenant=tenant, file_id=file_id)
        await self._repeat(call, already_done=UnknownFile)

    async def submit(self, batch: NewBatch) -> Submission:
        """Accept a batch durably: once this returns, no crash loses it."""
        return await self._ask(JobsService.submit, batch=batch, batch_id=new_batch_id(batch.kind))

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch in its current state."""
        return await self._ask(JobsService.batch, tenant=tenant, batch_id=batch_id)

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """Wait until the batch is final, at most `timeout_s`, and return it."""
        end_s = time.monotonic() + timeout_s

        def call() -> Awaitable[BatchRecord]:
            left_s = max(0.0, end_s - time.monotonic())
            return self._call(JobsService.wait, tenant=tenant, batch_id=batch_id, timeout_s=left_s)

        found: BatchRecord = await self._repeat(call, timeout_s)
        return found

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Return a page of the tenant's batches of one kind."""
        return await self._ask(JobsService.batches, tenant=tenant, kind=kind, page=page)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch."""
        call = partial(self._call, JobsService.cancel, tenant=tenant, batch_id=batch_id)
        found: BatchRecord | None = await self._repeat(call, already_done=BatchNotCancellable)
        return found or await self.batch(tenant, batch_id)

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Return lines with an index above `after_index`, in order, of any status."""
        return await self._ask(
            JobsService.lines, tenant=tenant, batch_id=batch_id, after_index=after_index, limit=limit
        )

    async def stats(self, tenant: str) -> BatchStats:
        """Return counts of the tenant's batches."""
        return await self._ask(JobsService.stats, tenant=tenant)

    async def line_request(self, tenant: str | None, request_id: str) -> JsonObject | None:
        """Return the object `request` of a line that runs or ended recently; None: there is no such line."""
        answers = await self._ask_all(JobsService.line_request, tenant=tenant, request_id=request_id)
        found = [answer for answer in answers if answer is not None]
        return min(
            found, key=lambda line: (line["status"] == _LEAST_TELLING, line["status"] != "running"), default=None
        )

    async def report_usage(self, report: UsageReport) -> None:
        """Add a process's usage durably, unless the report has come before."""
        await self._ask(JobsService.report_usage, report=report)

    async def usage(self, query: UsageQuery) -> UsagePage:
        """Return usage of the past, in order of day, tenant, model and band."""
        return await self._ask(JobsService.usage, query=query)

    async def storage_fault(self) -> str | None:
        """Return the code of the storage's present failure; None: it works."""
        return await self._ask(JobsService.storage_fault)

    async def metrics(self) -> JobsCounts:
        """Return the metrics of all tenants' work, and of all workers."""
        counts = await self._ask_all(JobsService.metrics)
        router = (family for each in counts for family in each.router)
        running = next((each.running for each in counts if each.running), ())
        return JobsCounts(_of_all_workers([each.own for each in counts]), tuple(router), running)

    async def _ask(self, method: Callable[..., Awaitable[ResultT]], **arguments: object) -> ResultT:
        answer: ResultT = await self._repeat(partial(self._call, method, **arguments))
        return answer

    async def _ask_all(self, method: Callable[..., Awaitable[ResultT]], **arguments: object) -> list[ResultT]:
        """Ask every worker, and return the answers; of any one worker where one of them hangs or is starting."""
        try:
            response = in_own_context(self._handle.broadcast, method.__name__, **arguments)
            answers = await response.results_async(timeout_s=_ALL_LIMIT_S, return_exceptions=True)
        except (TimeoutError, *HANDLE_ERRORS):
            answers = []
        answered = [answer for answer in answers if not isinstance(answer, BaseException)]
        return answered or [await self._ask(method, **arguments)]

    async def _repeat(
        self,
        call: Callable[[], Awaitable[ResultT]],
        extra_s: float = 0.0,
        already_done: type[ServingError] | tuple[()] = (),
    ) -> Any:
        """Call until an answer comes, and return it.

        `extra_s`: seconds by which the limit of this call is longer. `already_done`: an error which, after a lost
        call, means that the lost call did the work. The answer is then None; without a lost call the error is raised.

        Raises:
            NoReplicaAvailable: no answer within the limit.
        """
        was_lost = False
        try:
            async with asyncio.timeout(self._limit_s + extra_s):
                while True:
                    try:
                        return await call()
                    except _CallLost:
                        was_lost = True
                        await asyncio.sleep(_PAUSE_S)
                    except already_done:
                        if not was_lost:
                            raise
                        return None
        except TimeoutError:
            raise NoReplicaAvailable("the jobs process does not answer", retry_after_s=5.0) from None

    async def _call(self, method: Callable[..., Awaitable[ResultT]], **arguments: object) -> ResultT:
        """Call a method of the service once.

        Raises:
            ServingError: the method returned one, or it failed.
            _CallLost: the process died, is stopping, or has not started.
        """
        response = in_own_context(getattr(self._handle, method.__name__).remote, **arguments)
        try:
            answer: ResultT | ServingError = await response
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


def _of_all_workers(metrics: Sequence[Sequence[Metric]]) -> tuple[Metric, ...]:
    """Return the metrics of all workers as one: counters are added up.

    Gauges are about the database, and equal but for the moment. The state of the storage is the worst that one finds.
    """
    merged: dict[tuple[object, ...], Metric] = {}
    for metric in (metric for each in metrics for metric in each):
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


def answers_service_calls(deployment: type[DeploymentT]) -> type[DeploymentT]:
    """Add the methods of `JobsService` that a deployment class does not define; each calls the same of `service`."""
    for name in vars(JobsService):
        if not name.startswith("_") and not hasattr(deployment, name):
            setattr(deployment, name, _service_method(name))
    return deployment


def _service_method(name: str) -> Callable[..., Awaitable[object]]:
    async def method(deployment: Any, **arguments: object) -> object:
        try:
            return await getattr(deployment.service, name)(**arguments)
        except ServingError as error:
            return error  # if raised, Serve would log it as a failure with a traceback

    return method
