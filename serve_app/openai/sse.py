"""Server-sent events: how a stream of JSON objects goes over HTTP."""

from __future__ import annotations

from pydantic_core import to_json

from serve_app.openai.reply import JsonObject

CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""Says that the stream is complete; only after success."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore; it resets their read time-outs."""


def event(payload: JsonObject) -> bytes:
    """One event that carries a JSON object."""
    return b"data: " + to_json(payload) + b"\n\n"
