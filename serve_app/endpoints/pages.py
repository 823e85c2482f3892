"""Endpoints that describe the server: GET /, /docs, /openapi.json and /version; none needs an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve_app.http.exchange import Routes, json_response
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from serve_app.reference.answers import EngineVersion, VersionReply, Welcome
from serve_app.reference.document import api_document
from serve_app.reference.html import reference_page, welcome_page

_LINKS = {
    "documentation": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "readiness": "/health/ready",
    "dashboard": "/dashboard",
    "metrics": "/metrics",
    "load": "/load",
    "version": "/version",
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "vary": "accept",
}
"""Headers of the pages, which load nothing and run no script."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """The OpenAPI document as JSON, and its page."""

    document: bytes
    page: str


class PageEndpoints:
    """Endpoints with the pages for visitors and the OpenAPI document.

    Document and page are made together, once, in a worker thread, at the first request for either.
    """

    def __init__(
        self, model_name: str, workers: WorkerThreads, other_routes: Collection[str], keyed_routes: Collection[str]
    ) -> None:
        """Create the endpoints; the document describes their routes and those given, of which some require a key."""
        self._model_name = model_name
        self._workers = workers
        self._all_routes = (*self.routes(), *other_routes)
        self._keyed_routes = keyed_routes
        self._version = version("headway-serve")
        self._making = asyncio.Lock()
        self._made: _Reference | None = None

    def routes(self) -> Routes:
        """Return the handlers by method and path."""
        return {
            "GET /": self.welcome,
            "GET /docs": self.docs,
            "GET /openapi.json": self.openapi,
            "GET /version": self.version,
        }

    async def welcome(self, request: Request) -> Response:
        """Answer GET /: as a page if the client accepts HTML, else as JSON."""
        if "text/html" in request.headers.get("accept", ""):
            url = str(request.base_url).rstrip("/")
            return _page(welcome_page(self._model_name, self._version, url, _LINKS))
        reply = Welcome(name="headway", version=self._version, model=self._model_name, links=_LINKS)
        return json_response(reply, headers={"vary": "accept"})

    async def docs(self, request: Request) -> Response:
        """Answer GET /docs."""
        return _page((await self._reference()).page)

    async def openapi(self, request: Request) -> Response:
        """Answer GET /openapi.json."""
        return Response((await self._reference()).document, media_type="application/json")

    async def version(self, request: Request) -> Response:
        """Answer GET /version."""
        engine = EngineVersion(
            name="headway", version=self._version, torch=version("torch"), transformers=version("transformers")
        )
        return json_response(VersionReply(version=self._version, engine=engine))

    async def _reference(self) -> _Reference:
        async with self._making:
            if self._made is None:
                self._made = await self._workers.run(self._make)
            return self._made

    def _make(self) -> _Reference:
        document = api_document(self._all_routes, self._keyed_routes, self._model_name, self._version)
        return _Reference(to_json(document), reference_page(document))


def _page(html: str) -> Response:
    return Response(html, headers=_PAGE_HEADERS, media_type="text/html")
