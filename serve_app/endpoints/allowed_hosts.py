"""The `Host` headers that are answered: the guard against DNS rebinding."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import host_not_allowed

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


class AllowedHostsMiddleware:
    """A guard in front of an application: refuses requests whose `Host` is not in a list.

    A page of another site can give its own name the address of this machine, and then call this server from the
    visitor's browser. Such a call carries the page's name in `Host`.
    """

    def __init__(self, app: ASGIApp, allowed: str) -> None:
        """`allowed`: the setting `allowed_hosts`."""
        self._app = app
        self._allowed = frozenset(host.strip().lower() for host in allowed.split(","))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise the `HttpError` that refuses it."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not self._allows(host):
                raise host_not_allowed(host)
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if "*" in self._allowed:
            return True
        if match is None:
            return False
        name = match[1]
        return name in self._allowed or any(
            allowed.startswith("*.") and name.endswith(allowed[1:]) for allowed in self._allowed
        )
