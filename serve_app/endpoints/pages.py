"""Endpoints that describe the server: GET /, /docs, /openapi.json and /version; none needs an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve_app.http.exchange import json_response
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from serve_app.reference.answers import EngineVersion, VersionReply, Welcome
from serve_app.reference.document import api_document
from serve_app.reference.html import reference_page, welcome_page
from serve_app.reference.operations import Access, Operation

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

    def __init__(self, model_name: str, workers: WorkerThreads, has_keys: bool) -> None:
        self._model_name = model_name
        self._workers = workers
        self._has_keys = has_keys
        self._version = version("headway-serve")
        self._making = asyncio.Lock()
        self._made: _Reference | None = None

    @Operation("GET", "/", "Server", Welcome, {"text/html": ()}, access=Access.OPEN)
    async def welcome(self, request: Request) -> Response:
        """Say what this server is, as a page or as JSON."""
        if "text/html" in request.headers.get("accept", ""):
            url = str(request.base_url).rstrip("/")
            return _page(welcome_page(self._model_name, self._version, url, _LINKS))
        reply = Welcome(name="headway", version=self._version, model=self._model_name, links=_LINKS)
        return json_response(reply, headers={"vary": "accept"})

    @Operation("GET", "/docs", "Server", other_answers={"text/html": ()}, access=Access.OPEN)
    async def docs(self, request: Request) -> Response:
        """Show this description as a page."""
        return _page((await self._reference(request)).page)

    @Operation("GET", "/openapi.json", "Server", JsonObject, access=Access.OPEN)
    async def openapi(self, request: Request) -> Response:
        """Return this description."""
        return Response((await self._reference(request)).document, media_type="application/json")

    @Operation("GET", "/version", "Server", VersionReply, access=Access.OPEN)
    async def version(self, request: Request) -> Response:
        """Return the versions of the server and its engine."""
        engine = EngineVersion(
            name="headway", version=self._version, torch=version("torch"), transformers=version("transformers")
        )
        return json_response(VersionReply(version=self._version, engine=engine))

    async def _reference(self, request: Request) -> _Reference:
        async with self._making:
            if self._made is None:
                operations = [route.endpoint.operation for route in request.app.routes]
                self._made = await self._workers.run(partial(self._make, operations))
            return self._made

    def _make(self, operations: Collection[Operation]) -> _Reference:
        document = api_document(operations, self._has_keys, self._model_name, self._version)
        return _Reference(to_json(document), reference_page(document))


def _page(html: str) -> Response:
    return Response(html, headers=_PAGE_HEADERS, media_type="text/html")
