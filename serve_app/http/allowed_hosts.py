"""Guard against DNS rebinding: only requests with an allowed `Host` header are answered."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import host_not_allowed

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


class AllowedHostsMiddleware:
    """Middleware that refuses requests whose `Host` is not in a list.

    In DNS rebinding a web page points its own host name to this machine's address and calls this server from the
    visitor's browser. Such a call carries the page's host name in `Host`.
    """

    def __init__(self, app: ASGIApp, allowed: str) -> None:
        """Create the middleware; `allowed` is the setting `allowed_hosts`."""
        self._app = app
        self._allowed = frozenset(host.strip().lower() for host in allowed.split(","))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise an `HttpError` (403) if its host is not allowed."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not self._allows(host):
                raise host_not_allowed(host)
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        if "*" in self._allowed:
            return True
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1]
        return name in self._allowed or any(
            allowed.startswith("*.") and name.endswith(allowed[1:]) for allowed in self._allowed
        )
