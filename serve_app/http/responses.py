"""Types and helpers of the endpoints: routes and JSON responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve_app.openai.reply.format import JsonObject

Routes = Mapping[str, Callable[[Request], Awaitable[Response]]]
"""Handlers by method and path, such as `GET /v1/files`; the first match is used."""


def json_response(value: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON object."""
    return Response(to_json(value), status, headers, "application/json")
