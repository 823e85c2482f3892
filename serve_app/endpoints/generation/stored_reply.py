"""Record of a response in the store while a client waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.jobs.api.responses import NewResponse, ResponseEnd, ResponseStatus
from serve_app.jobs.response_client import StoredResponses
from serve_app.protocols.responses.stored import split_response


class StoredReply:
    """Record of a response: implementation of `ReplyRecord`.

    The begin is stored while the model computes the prompt, so that it delays the first token little.
    """

    def __init__(self, store: StoredResponses, new: NewResponse) -> None:
        self._store = store
        self._new = new
        self._beginning = asyncio.create_task(store.begin(new))
        self._beginning.add_done_callback(_observed)
        self._is_visible = False
        self._has_ended = False

    async def begun(self) -> None:
        """Wait until the begin is stored.

        Raises:
            ServingError: it cannot be stored.
        """
        await asyncio.shield(self._beginning)
        self._is_visible = True

    async def ended(self, reply: dict[str, Any]) -> None:
        """Store the end of the response.

        Raises:
            ServingError: it cannot be stored.
        """
        await self.begun()
        self._has_ended = True
        await self._store.end(self._end(ResponseStatus(reply["status"]), *split_response(reply)))

    def left(self) -> None:
        """Note that nothing more is sent: a response that the client has seen was cancelled; another is deleted."""
        if self._has_ended:
            return
        self._has_ended = True
        self._beginning.add_done_callback(self._close)

    def _close(self, beginning: asyncio.Task[None]) -> None:
        if beginning.cancelled() or beginning.exception() is not None:
            return
        if self._is_visible:
            self._store.end_later(self._end(ResponseStatus.CANCELLED, self._new.response, ()))
        else:
            self._store.delete_later(self._new.tenant, self._new.id)

    def _end(self, status: ResponseStatus, response: str, output: tuple[str, ...]) -> ResponseEnd:
        return ResponseEnd(self._new.id, status, response, output)


def _observed(beginning: asyncio.Task[None]) -> None:
    """Take the error of a begin for which nobody waits any more."""
    if not beginning.cancelled():
        beginning.exception()
