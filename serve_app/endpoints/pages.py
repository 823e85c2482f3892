"""Endpoints for visitors: pages for chats, operators and the API, with their scripts; none needs an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import PurePath

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import route_not_found
from serve_app.http.exchange import json_response
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from serve_app.reference.answers import EngineVersion, VersionReply, Welcome
from serve_app.reference.document import api_document
from serve_app.reference.html import reference_page
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
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}
"""Headers of the pages, which load and call nothing but this server."""
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@dataclass(frozen=True, slots=True)
class _Reference:
    """The OpenAPI document as JSON, and its page."""

    document: bytes
    page: str


class PageEndpoints:
    """Endpoints with the pages for visitors and the OpenAPI document.

    Document and page of the API are made together, once, in a worker thread, at the first request for either. The
    other pages are files.
    """

    def __init__(
        self, model_name: str, workers: WorkerThreads, has_keys: bool, ray_dashboard_url: str | None = None
    ) -> None:
        self._model_name = model_name
        self._workers = workers
        self._has_keys = has_keys
        self._ray_dashboard_url = ray_dashboard_url
        self._files = {path.name: path.read_bytes() for path in (files("serve_app") / "pages").iterdir()}
        self._version = version("headway-serve")
        self._making = asyncio.Lock()
        self._made: _Reference | None = None

    @Operation("GET", "/", "Server", Welcome, {"text/html": ()}, access=Access.OPEN)
    async def welcome(self, request: Request) -> Response:
        """Say what this server is as JSON, or show the page for chats."""
        if "text/html" in request.headers.get("accept", ""):
            return self._file("chat.html")
        reply = Welcome(
            name="headway",
            version=self._version,
            model=self._model_name,
            links=_LINKS,
            ray_dashboard=self._ray_dashboard_url,
        )
        return json_response(reply, headers={"vary": "accept"})

    @Operation("GET", "/dashboard", "Server", other_answers={"text/html": ()}, access=Access.OPEN)
    async def dashboard(self, request: Request) -> Response:
        """Show the dashboard; with API keys it asks for an operator's."""
        return self._file("dashboard.html")

    @Operation("GET", "/docs", "Server", other_answers={"text/html": ()}, access=Access.OPEN)
    async def docs(self, request: Request) -> Response:
        """Show this description as a page."""
        return Response((await self._reference(request)).page, headers=_HEADERS, media_type="text/html")

    @Operation(
        "GET",
        "/pages/{name}",
        "Server",
        other_answers={"text/javascript": (), "text/css": ()},
        access=Access.OPEN,
        failures=frozenset({404}),
    )
    async def file(self, request: Request) -> Response:
        """Return a script or a style of the pages."""
        name = request.path_params["name"]
        if name not in self._files or name.endswith(".html"):
            raise route_not_found(request.method, request.url.path)
        return self._file(name)

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

    def _file(self, name: str) -> Response:
        return Response(self._files[name], headers=_HEADERS, media_type=_MEDIA_TYPES[PurePath(name).suffix])

    async def _reference(self, request: Request) -> _Reference:
        async with self._making:
            if self._made is None:
                operations = [route.endpoint.operation for route in request.app.routes]
                self._made = await self._workers.run(partial(self._make, operations))
            return self._made

    def _make(self, operations: Collection[Operation]) -> _Reference:
        document = api_document(operations, self._has_keys, self._model_name, self._version)
        return _Reference(to_json(document), reference_page(document))
