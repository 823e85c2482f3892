"""Gate of an ingress: counts the requests inside, and is closed before the ingress stops."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from replicas.errors import NoReplicaAvailable
from serve_app.http.exchange import SCOPE_KEY, Cancellation

_ALWAYS_OPEN = frozenset({"/health/live", "/metrics", "/load"})
"""Paths that are answered until the end."""
_LAST_EVENTS_S = 1.0
"""Longest time for the last events of requests that are interrupted, seconds."""


class Gate:
    """Gate that admits requests until it is closed; it is used on one event loop.

    Invariant: `num_inside` is the number of requests that were admitted and have not ended.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_staying = True
        """False once the ingress is to be removed: further requests are admitted, and feeds without end are over."""
        self._inside: set[Cancellation] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_inside(self) -> int:
        """Number of requests inside."""
        return len(self._inside)

    def enter(self, cancellation: Cancellation) -> None:
        """Admit a request.

        Raises:
            NoReplicaAvailable: the gate is closed.
        """
        if not self.is_open:
            raise NoReplicaAvailable("the server is stopping", code="draining")
        self._inside.add(cancellation)
        self._empty.clear()

    def leave(self, cancellation: Cancellation) -> None:
        """Count an admitted request as ended."""
        self._inside.remove(cancellation)
        if not self._inside:
            self._empty.set()

    async def close(self, limit_s: float) -> int:
        """Admit no further request, and wait at most `limit_s` for those inside; interrupt and count those left."""
        self.is_open = self.is_staying = False
        await self._until_empty(limit_s)
        num_left = self.num_inside
        self.interrupt()
        await self._until_empty(_LAST_EVENTS_S)
        return num_left

    def remove(self, after_s: float) -> None:
        """Note that the ingress is to be removed: requests that are inside after `after_s` are interrupted."""
        self.is_staying = False
        asyncio.get_running_loop().call_later(after_s, self.interrupt)

    def interrupt(self) -> None:
        """End the completions inside with an error."""
        for cancellation in list(self._inside):
            cancellation.request(NoReplicaAvailable("the server is stopping; the answer is not whole", code="draining"))

    async def _until_empty(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._empty.wait()


class GateMiddleware:
    """Middleware that lets requests through a gate; probes and metrics pass by it."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise `NoReplicaAvailable` (503) if the gate is closed."""
        if scope["type"] != "http" or scope["path"] in _ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        cancellation: Cancellation = scope[SCOPE_KEY].cancellation
        self._gate.enter(cancellation)
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave(cancellation)
