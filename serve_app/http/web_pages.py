"""Web pages as clients: the guard against foreign pages, and the CORS headers for the pages that may call."""

from __future__ import annotations

import re

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import host_not_allowed, origin_not_allowed
from serve_app.http.settings import AllowedOrigins

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OTHER_SITE = frozenset({"cross-site", "same-site"})


class WebPageGuard:
    """Middleware that refuses requests of web pages that may not call this server.

    In DNS rebinding a page points its own host name to this machine's address and calls this server from the visitor's
    browser. Such a call carries the page's host name in `Host`, which is not in the list.

    Browsers send some requests of a foreign page, such as the upload of a form, without asking first, and only hide the
    answer. Such a request carries the page's origin in `Origin`, and `Sec-Fetch-Site` says that it is another site's.
    """

    def __init__(self, app: ASGIApp, hosts: str, origins: AllowedOrigins) -> None:
        """Create the middleware; `hosts` is the setting `allowed_hosts`."""
        self._app = app
        self._hosts = frozenset(host.strip().lower() for host in hosts.split(","))
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise an `HttpError` (403) if its host or its page is not allowed."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if not self._allows_host(host):
                raise host_not_allowed(host)
            if scope["method"] not in _READING and headers.get("sec-fetch-site") in _OTHER_SITE:
                origin = headers.get("origin", "null")
                if not self._origins.allows(origin):
                    raise origin_not_allowed(origin)
        await self._app(scope, receive, send)

    def _allows_host(self, host: str) -> bool:
        if "*" in self._hosts:
            return True
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1]
        return name in self._hosts or any(
            allowed.startswith("*.") and name.endswith(allowed[1:]) for allowed in self._hosts
        )


class OriginsMiddleware(CORSMiddleware):
    """Middleware that answers preflights and adds the CORS headers to every response, also to errors and streams.

    Every method and header may be sent and every header of a response read, from a private network too. Cookies are
    not allowed: keys travel in `Authorization`.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedOrigins) -> None:
        super().__init__(
            app,
            allow_origins=allowed.names,
            allow_origin_regex=allowed.pattern,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight; 403 if the origin is not allowed."""
        if self.is_allowed_origin(request_headers["origin"]):
            return super().preflight_response(request_headers)
        reply = origin_not_allowed(request_headers["origin"]).reply
        return Response(to_json(reply.body), reply.status, {"vary": "origin"}, "application/json")
