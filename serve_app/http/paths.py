"""Paths of requests: trailing slashes, HEAD, and the methods that a path accepts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send


class PathMiddleware:
    """Middleware that serves a path with a trailing slash like the path without it, and HEAD like GET.

    `ExchangeMiddleware` leaves out the body of the answer to a HEAD. A slash that is percent-encoded belongs to an id
    and stays.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            scope["path"] = _without_slash(scope)
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
        await self._app(scope, receive, send)


def _without_slash(scope: Scope) -> str:
    path: str = scope["path"]
    raw_path: bytes = scope.get("raw_path") or path.encode()
    has_slash = len(path) > 1 and path.endswith("/") and raw_path.endswith(b"/")
    return path[:-1] if has_slash else path


def allowed_methods(request: Request) -> str:
    """Return the value of the header `Allow` for a request's path, which has a route."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))
