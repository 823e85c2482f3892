"""Responses of endpoints."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import to_json
from starlette.responses import Response

from serve_app.openai.reply import JsonObject


def json_response(value: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON object as a response."""
    return Response(to_json(value), status, headers, "application/json")
