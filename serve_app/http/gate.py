"""Gate of an ingress: counts the requests inside, and is closed before the ingress stops."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from replicas.errors import NoReplicaAvailable

_ALWAYS_OPEN = frozenset({"/health/live", "/metrics", "/load"})
"""Paths that are answered until the end."""


class Gate:
    """Gate that admits requests until it is closed; it is used on one event loop.

    Invariant: `num_inside` is the number of requests that were admitted and have not ended.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        """Admit a request.

        Raises:
            NoReplicaAvailable: the gate is closed.
        """
        if not self.is_open:
            raise NoReplicaAvailable("the server is stopping", code="draining")
        self.num_inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Count an admitted request as ended."""
        self.num_inside -= 1
        if self.num_inside == 0:
            self._empty.set()

    async def close(self, limit_s: float) -> int:
        """Admit no further request, and wait at most `limit_s` for those inside; return the number of those left."""
        self.is_open = False
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self.num_inside


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
        self._gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()
