"""How ingresses reach the jobs deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from replicas.errors import NoReplicaAvailable, ServingError
from router.serve_router import in_own_context
from serve_app.jobs.errors import BatchNotCancellable, UnknownFile
from serve_app.jobs.records import (
    BatchKind,
    BatchRecord,
    BatchStats,
    FileRecord,
    LineRecord,
    NewBatch,
    Page,
    PageRequest,
    Submission,
)
from serve_app.jobs.rpc import RpcAddress, RpcClient, RpcLost
from serve_app.jobs.service import new_batch_id
from serve_app.metrics import JobsCounts

_LIMIT_S = 30.0
_PAUSE_S = 0.2
_LOST = (RpcLost, RayError, RayServeException, grpc.aio.AioRpcError)


class ServeJobs:
    """A `JobsService` in the jobs deployment's process, whose address its Serve handle tells.

    A call that the process does not live to answer is made again to the next one, for a while. None of them minds
    being made twice: whoever submits a batch has given it its id, and what is deleted or cancelled twice is so once.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._client = RpcClient(self._find)

    async def close(self) -> None:
        """Close what is open."""
        await self._client.close()

    async def add_file(self, file: FileRecord) -> None:
        """Note a file whose bytes are complete in the store."""
        await self._ask("add_file", file)

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file that has not expired."""
        found: FileRecord = await self._ask("file", tenant, file_id)
        return found

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Some of the tenant's files."""
        found: Page[FileRecord] = await self._ask("files", tenant, purpose, page)
        return found

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget a file and delete its bytes."""
        await self._ask("delete_file", tenant, file_id, already_done=UnknownFile)

    async def submit(self, batch: NewBatch) -> Submission:
        """Accept a batch; when this returns, no crash loses it."""
        accepted: Submission = await self._ask("submit", batch, new_batch_id(batch.kind))
        return accepted

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch as it is now."""
        found: BatchRecord = await self._ask("batch", tenant, batch_id)
        return found

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """The batch once it is final, or as it is after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        found: BatchRecord = await self._repeat(
            lambda: self._client.call("wait", tenant, batch_id, max(0.0, end_s - time.monotonic())),
            limit_s=_LIMIT_S + timeout_s,
        )
        return found

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Some of the tenant's batches of one kind."""
        found: Page[BatchRecord] = await self._ask("batches", tenant, kind, page)
        return found

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch."""
        found: BatchRecord | None = await self._ask("cancel", tenant, batch_id, already_done=BatchNotCancellable)
        return found or await self.batch(tenant, batch_id)

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Lines behind `after_index`, in order, whatever their status."""
        found: list[LineRecord] = await self._ask("lines", tenant, batch_id, after_index, limit)
        return found

    async def stats(self, tenant: str) -> BatchStats:
        """The tenant's batches in numbers."""
        found: BatchStats = await self._ask("stats", tenant)
        return found

    async def metrics(self) -> JobsCounts:
        """What is counted of all tenants' work."""
        found: JobsCounts = await self._ask("metrics")
        return found

    async def _ask(self, method_name: str, *args: object, already_done: type[ServingError] | tuple[()] = ()) -> Any:
        return await self._repeat(lambda: self._client.call(method_name, *args), _LIMIT_S, already_done)

    async def _repeat(
        self,
        call: Callable[[], Awaitable[Any]],
        limit_s: float,
        already_done: type[ServingError] | tuple[()] = (),
    ) -> Any:
        """What the call gives once it is answered; None: a repeated one raises what says that an earlier one worked."""
        was_lost = False
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await call()
                    except _LOST:  # the process has died, or is not there yet
                        was_lost = True
                        await asyncio.sleep(_PAUSE_S)
                    except already_done:
                        if not was_lost:
                            raise
                        return None
        except TimeoutError:
            raise NoReplicaAvailable("the jobs process does not answer", retry_after_s=5.0) from None

    async def _find(self) -> RpcAddress:
        address: RpcAddress = await in_own_context(self._handle.address.remote)
        return address
