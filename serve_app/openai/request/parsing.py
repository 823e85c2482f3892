"""Parsing of a body's bytes into its schema; every error is an InvalidRequest that names the field."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from replicas.errors import InvalidRequest
from serve_app.errors import shortened
from serve_app.openai.request.ignored_fields import IgnoredValues, without_ignored
from serve_app.openai.request.schema import CONFLICT, UNSUPPORTED

BodyT = TypeVar("BodyT", bound=BaseModel)

_MAX_NAMES = 10
"""Most fields that one error names."""


def parse_json(data: bytes) -> dict[str, object]:
    """Return the JSON object in `data`.

    Raises:
        InvalidRequest: `data` is not valid JSON (NaN and lone surrogates are invalid), or not an object.
    """
    try:
        value = _from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _from_json(data: bytes) -> object:
    """Parse with the garbage collector off: each of its runs walks the whole heap while it holds the GIL."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return from_json(data, allow_inf_nan=False)
    finally:
        if was_enabled:
            gc.enable()


def parse_body(schema: type[BodyT], fields: Mapping[str, object], ignored: IgnoredValues) -> BodyT:
    """Return `fields` as a `schema`; a field in `ignored` is accepted with the values listed there.

    Raises:
        InvalidRequest: a field is unknown, not supported, missing or of a wrong type or value.
    """
    served = without_ignored(fields, ignored)
    refused = [name for name in served if name not in schema.model_fields]
    if refused:
        raise _refusal(refused, ignored)
    try:
        return schema.model_validate(served)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False)) from None


def invalid_request(errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """Return the error for the first of a schema's findings."""
    error = errors[0]
    context = error.get("ctx", {})
    param = context.get("param") or _path(error["loc"])
    if error["type"] == "missing":
        return InvalidRequest(f"`{param}` is missing", param, "missing_required_parameter")
    if error["type"] in (UNSUPPORTED, "extra_forbidden"):
        reason = "is not supported" if error["type"] == "extra_forbidden" else error["msg"]
        return InvalidRequest(f"`{param}`: {reason}", param, "unsupported_parameter")
    reason = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return InvalidRequest(f"`{param}` {reason}{_shown(error)}", param)


def _refusal(names: list[str], ignored: IgnoredValues) -> InvalidRequest:
    known = [name for name in names if name in ignored]
    listed = ", ".join(f"`{shortened(name)}`" for name in names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        listed += f" and {len(names) - _MAX_NAMES} more"
    param = shortened(names[0])
    if known and len(known) == len(names):
        return InvalidRequest(f"not supported: {listed}", param, "unsupported_parameter")
    return InvalidRequest(f"unknown or not supported: {listed}", param, "unsupported_parameter")


def _path(location: Sequence[int | str]) -> str:
    """Return a field's location in OpenAI's notation, such as `messages[0].content`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" for part in location)
    return path.removeprefix(".")


def _shown(error: ErrorDetails) -> str:
    """Return the refused value as text if it is a plain one, else an empty string."""
    value = error["input"]
    if isinstance(value, bool | int | float | str) and error["type"] != CONFLICT:
        return f"; got {shortened(repr(value))}"
    return ""
