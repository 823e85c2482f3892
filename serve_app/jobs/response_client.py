"""Stored responses as an ingress sees them: calls of their store, and the lease of those that the ingress answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from replicas.errors import ServingError
from serve_app.jobs.api.records import JobsClient, new_id
from serve_app.jobs.api.responses import NewResponse, ResponseEnd, ResponsesService

logger = logging.getLogger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class StoredResponses:
    """Client of the store of responses, and the owner of those that this ingress answers.

    While some run, it says so each `heartbeat_s`: if it dies, the store ends them as failed.

    Invariant: a response counts as running from its begin until its end is stored, or cannot be.
    """

    def __init__(self, client: JobsClient, heartbeat_s: float) -> None:
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._owner = new_id("owner")
        self._content_key: bytes | None = None
        self._running: set[str] = set()
        self._is_known = False
        """True if the store knows this owner: from the begin of a response to the first heartbeat without one."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(
        self,
        method: Callable[Concatenate[ResponsesService, P], Awaitable[ResultT]],
        *args: P.args,
        **arguments: P.kwargs,
    ) -> ResultT:
        """Call a method of the store.

        Raises:
            ServingError: the method raised it, or it failed.
        """
        return await self._client.call(method, *args, **arguments)

    async def content_key(self) -> bytes:
        """Return the key of encrypted contents, which is asked for once.

        Raises:
            ServingError: it cannot be read.
        """
        if self._content_key is None:
            self._content_key = await self.call(ResponsesService.content_key)
        return self._content_key

    async def run(self) -> None:
        """Send heartbeats while responses run, until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self._is_known:
                continue
            is_busy = bool(self._running)
            try:
                await self.call(ResponsesService.hold_responses, self._owner, is_busy)
            except ServingError as error:
                logger.warning("a heartbeat of stored responses failed", extra={"error": str(error)})
            else:
                self._is_known = is_busy or bool(self._running)

    async def begin(self, new: NewResponse) -> None:
        """Store a response that begins: one of this ingress, unless it runs in the background.

        Raises:
            ServingError: it cannot be stored.
        """
        is_own = new.run is None
        if is_own:
            self._running.add(new.id)
            self._is_known = True
        try:
            await self.call(ResponsesService.begin_response, new, self._owner if is_own else None)
        except BaseException:
            self._running.discard(new.id)
            raise

    async def end(self, end: ResponseEnd) -> None:
        """Store the end of a response.

        Raises:
            ServingError: it cannot be stored.
        """
        try:
            await self.call(ResponsesService.end_response, end, self._owner)
        finally:
            self._running.discard(end.id)

    def end_later(self, end: ResponseEnd) -> None:
        """Store the end of a response whose client has left."""
        self._later(self.end(end))

    def delete_later(self, tenant: str, response_id: str) -> None:
        """Delete a response that no client has heard of."""
        self._running.discard(response_id)
        self._later(self.call(ResponsesService.delete_response, tenant, response_id))

    def _later(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except ServingError as error:
                logger.warning("the end of a stored response was lost", extra={"error": str(error)})

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
