"""Checks that schemathesis makes beside its own; it loads this module by the name in `SCHEMATHESIS_HOOKS`."""

from __future__ import annotations

import functools
import json
from typing import Any
from urllib.parse import unquote, urlsplit

import schemathesis

from testkit.http.documented_answers import DocumentedAnswers, Given

_MOST = 8
"""Largest number of tokens and choices that `map_body` leaves."""


@schemathesis.check
def documented_answer(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Fail if the answer, streams included, is not as documented, or is a failure of the server.

    Status 503 and 504 are answers as any other.
    """
    if response.status_code in (500, 502):
        raise AssertionError(f"the server failed: {response.text}")
    path = unquote(urlsplit(response.request.url or "").path)
    content_type = response.headers.get("content-type", [""])[0]
    given = Given(case.method, path, response.status_code, content_type, response.content)
    problems = _documented(json.dumps(case.operation.schema.raw_schema)).problems(given)
    assert not problems, "\n".join(problems)


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Return the body with fewer contradictions between its fields, so that more bodies reach the engine."""
    if not isinstance(body, dict):
        return body
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs", "n"):
        if type(body.get(name)) is int and body[name] > _MOST:
            body[name] = 1 + body[name] % _MOST
    if body.get("max_tokens") is not None:
        body.pop("max_completion_tokens", None)
        body["min_tokens"] = 0
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    body.pop("best_of", None)
    return body


@functools.cache
def _documented(document: str) -> DocumentedAnswers:
    return DocumentedAnswers(json.loads(document))
