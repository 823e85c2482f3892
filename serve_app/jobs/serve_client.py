"""Both ends of the calls that ingresses make to the jobs deployment, over Serve's deployment handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from replicas.errors import NoReplicaAvailable, ServingError
from router.serve_router import HANDLE_ERRORS, in_own_context, is_cancelled
from serve_app.jobs.errors import BatchNotCancellable, UnknownFile
from serve_app.jobs.ids import new_batch_id
from serve_app.jobs.records import (
    BatchKind,
    BatchRecord,
    BatchStats,
    FileRecord,
    JobsService,
    LineRecord,
    NewBatch,
    Page,
    PageRequest,
    Submission,
)
from serve_app.metrics import JobsCounts

DeploymentT = TypeVar("DeploymentT")

_PAUSE_S = 0.2
"""Seconds between a call that was lost and the next attempt."""


class _CallLost(Exception):
    """No answer came. The call may have been carried out."""


class ServeJobs:
    """A `JobsService` that calls the jobs deployment.

    A call whose process dies before it answers is made again to the next process, until the limit. Every method
    may be carried out twice: a new batch comes with its id, and what is deleted or cancelled twice is so once.
    """

    def __init__(self, handle: DeploymentHandle[Any], limit_s: float = 30.0) -> None:
        """`limit_s` bounds every call, repeated ones included, beyond what `wait` is to wait, seconds."""
        self._handle = handle
        self._limit_s = limit_s

    async def add_file(self, file: FileRecord) -> None:
        """Note a file whose bytes are complete in the store."""
        await self._ask("add_file", file=file)

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file that has not expired."""
        found: FileRecord = await self._ask("file", tenant=tenant, file_id=file_id)
        return found

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Some of the tenant's files."""
        found: Page[FileRecord] = await self._ask("files", tenant=tenant, purpose=purpose, page=page)
        return found

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget a file and delete its bytes."""
        await self._ask("delete_file", UnknownFile, tenant=tenant, file_id=file_id)

    async def submit(self, batch: NewBatch) -> Submission:
        """Accept a batch; when this returns, no crash loses it."""
        accepted: Submission = await self._ask("submit", batch=batch, batch_id=new_batch_id(batch.kind))
        return accepted

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch as it is now."""
        found: BatchRecord = await self._ask("batch", tenant=tenant, batch_id=batch_id)
        return found

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """The batch once it is final, or as it is after `timeout_s`."""
        end_s = time.monotonic() + timeout_s

        def call() -> Awaitable[Any]:
            return self._call("wait", tenant=tenant, batch_id=batch_id, timeout_s=max(0.0, end_s - time.monotonic()))

        found: BatchRecord = await self._repeat(call, self._limit_s + timeout_s)
        return found

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Some of the tenant's batches of one kind."""
        found: Page[BatchRecord] = await self._ask("batches", tenant=tenant, kind=kind, page=page)
        return found

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch."""
        found: BatchRecord | None = await self._ask("cancel", BatchNotCancellable, tenant=tenant, batch_id=batch_id)
        return found or await self.batch(tenant, batch_id)

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Lines behind `after_index`, in order, whatever their status."""
        found: list[LineRecord] = await self._ask(
            "lines", tenant=tenant, batch_id=batch_id, after_index=after_index, limit=limit
        )
        return found

    async def stats(self, tenant: str) -> BatchStats:
        """The tenant's batches in numbers."""
        found: BatchStats = await self._ask("stats", tenant=tenant)
        return found

    async def metrics(self) -> JobsCounts:
        """What is counted of all tenants' work."""
        found: JobsCounts = await self._ask("metrics")
        return found

    async def _ask(
        self, method_name: str, already_done: type[ServingError] | tuple[()] = (), **arguments: object
    ) -> Any:
        return await self._repeat(lambda: self._call(method_name, **arguments), self._limit_s, already_done)

    async def _repeat(
        self, call: Callable[[], Awaitable[Any]], limit_s: float, already_done: type[ServingError] | tuple[()] = ()
    ) -> Any:
        """Call until an answer comes, and return it.

        `already_done`: the error that tells of a repeated call that a lost one has done the work; the answer is None.
        """
        was_lost = False
        try:
            async with asyncio.timeout(limit_s):
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

    async def _call(self, method_name: str, **arguments: object) -> Any:
        """Make one call.

        Raises:
            ServingError: returned by the method, or the method failed.
            _CallLost: the process died, is being stopped, or is not there yet.
        """
        response = in_own_context(getattr(self._handle, method_name).remote, **arguments)
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()  # Serve would carry it on: the task that awaits a call is not the call
            if is_cancelled():
                raise
            raise _CallLost from None
        except RayTaskError as error:
            raise _failure() from error
        except HANDLE_ERRORS as error:
            raise _CallLost from error
        except Exception as error:  # over gRPC an error of the method comes as it is
            raise _failure() from error
        if isinstance(answer, ServingError):
            raise answer
        return answer


def _failure() -> ServingError:
    """The error of a method that failed; the cause, which may hold anything, is in the jobs process's log alone."""
    return ServingError("the jobs process failed; its log says why")


def answers_service_calls(deployment: type[DeploymentT]) -> type[DeploymentT]:
    """Give a deployment a method for each one of `JobsService` that it does not define, done by its `service`."""
    for name in vars(JobsService):
        if not name.startswith("_") and not hasattr(deployment, name):
            setattr(deployment, name, _service_method(name))
    return deployment


def _service_method(name: str) -> Callable[..., Awaitable[object]]:
    async def method(deployment: Any, **arguments: object) -> object:
        try:
            return await getattr(deployment.service, name)(**arguments)
        except ServingError as error:
            return error  # Serve would log it, raised, as a failure and with its traceback

    return method
