"""Checks of the lines of an input file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic_core import from_json

from replicas.errors import InvalidRequest, UnknownModel
from serve_app.errors import shortened
from serve_app.jobs.api.records import BatchError, NewLine
from serve_app.openai.request.ignored_fields import CHAT_IGNORED, COMPLETION_IGNORED, IgnoredValues
from serve_app.openai.request.limits import check_model
from serve_app.openai.request.parsing import parse_body, parse_json
from serve_app.openai.request.schema import ChatBody, CompletionBody

_MAX_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


class Endpoint(NamedTuple):
    """Schema of an endpoint's request bodies, and the values of ignored fields that are accepted."""

    schema: type[ChatBody] | type[CompletionBody]
    ignored: IgnoredValues


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatBody, CHAT_IGNORED),
    "/v1/completions": Endpoint(CompletionBody, COMPLETION_IGNORED),
}
"""Endpoints that batches may name, by URL path."""


class LineChecker:
    """Checker of one batch's lines: the fields around the body, and the model that the body names.

    The rest of a body is validated when the line runs, as its endpoint does. An error there fails only that line.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._url = endpoint
        self._model_name = model_name

    def check(self, data: bytes, number: int) -> NewLine | BatchError:
        """Return the request in a line, or the first error found in it; `number` is the line's, from 1."""
        try:
            fields = parse_json(data)
        except InvalidRequest:
            return BatchError("invalid_json_line", "This line is not parseable as a JSON object.", line=number)
        try:
            return self._line(fields)
        except (InvalidRequest, UnknownModel) as error:
            param = error.param if isinstance(error, InvalidRequest) else "body.model"
            return BatchError(error.code, error.message, param, number)

    def _line(self, fields: Mapping[str, object]) -> NewLine:
        for name in _FIELDS:
            if fields.get(name) is None:
                raise InvalidRequest(f"`{name}` is missing", name, "missing_required_parameter")
        if unknown := next((name for name in fields if name not in _FIELDS), None):
            raise InvalidRequest(f"`{shortened(unknown)}` is not a field of a line", shortened(unknown))
        custom_id, body = fields["custom_id"], fields["body"]
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS or "\0" in custom_id:
            message = f"`custom_id` must be a string of 1 to {_MAX_ID_CHARS} characters, none of them NUL"
            raise InvalidRequest(message, "custom_id")
        if fields["method"] != "POST":
            raise InvalidRequest(f"`method` is {shortened(repr(fields['method']))}; it must be POST", "method")
        if fields["url"] != self._url:
            message = f"`url` is {shortened(repr(fields['url']))}; the batch's endpoint is {self._url}"
            raise InvalidRequest(message, "url", "mismatched_url")
        if not isinstance(body, dict):
            raise InvalidRequest("`body` must be an object", "body")
        if isinstance(body.get("model"), str):
            check_model(body["model"], self._model_name)
        return NewLine(custom_id, body)


def parse_line_body(endpoint: str, text: str) -> ChatBody | CompletionBody:
    """Parse the JSON of a line's body as its endpoint does.

    Raises:
        InvalidRequest: the endpoint would refuse it, or it asks for a stream.
    """
    schema, ignored = ENDPOINTS[endpoint]
    parsed = parse_body(schema, from_json(text), ignored)
    if parsed.stream:
        raise InvalidRequest("`stream` is true; a batch cannot stream", "stream", "unsupported_parameter")
    return parsed
