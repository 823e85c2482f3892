"""Parsing of a body's bytes, within the limits, into its schema; every InvalidRequest names the field."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from replicas.errors import InvalidRequest
from serve_app.errors import shortened, shown
from serve_app.openai.request.body import CONFLICT, INVALID, MISSING, UNSUPPORTED, IgnoredValues, without_ignored
from serve_app.openai.request.sizes import check_fields, check_json
from serve_app.openai.request.unknown_fields import CHAT_LEVEL, REPLACED, IgnoredFields, Level
from serve_app.openai.request.validation import RequestLimits

BodyT = TypeVar("BodyT", bound=BaseModel)
ResultT = TypeVar("ResultT")

REASONS: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_too_long": "has {length} characters; at most {max_length} are accepted",
    "string_too_short": "has {length} characters; it must have at least {min_length}",
    "string_type": "must be a string",
    "too_long": "has {length} items; at most {max_length} are accepted",
    "too_short": "has {length} items; it must have at least {min_length}",
}
"""Reason that a client reads for each of pydantic's error types that the schemas can have."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Beginning of UTF-8 texts of some programs; it is ignored before JSON."""

_MAX_NAMES = 10
"""Most fields that one error names."""


@dataclass(frozen=True, slots=True)
class Converted(Generic[ResultT]):
    """Result that was made of a body."""

    value: ResultT
    ignored_fields: tuple[str, ...]
    """Fields of the body that have no effect."""


def check_beginning(parts: Sequence[bytes], limits: RequestLimits) -> None:
    """Refuse a JSON body whose first parts have more values than are accepted.

    Raises:
        InvalidRequest: naming the limit and the value.
    """
    check_json(b"".join(parts), limits)


def read_fields(parts: Sequence[bytes], limits: RequestLimits) -> dict[str, object]:
    """Return the fields of a JSON body that came in parts.

    Raises:
        InvalidRequest: the body is not a JSON object, or has too many values.
    """
    data = b"".join(parts)
    check_json(data, limits)
    fields = parse_json(data)
    check_fields(fields, limits)
    return fields


def convert_fields(
    make: Callable[[dict[str, object]], ResultT],
    limits: RequestLimits,
    fields: dict[str, object],
    level: Level = CHAT_LEVEL,
) -> Converted[ResultT]:
    """Return `make(fields)` for a body's fields, without those that `level` does not know and that are ignored.

    Raises:
        InvalidRequest: `make` refuses a field.
    """
    ignored = IgnoredFields()
    known = ignored.known_fields(fields, level) if limits.unknown_fields == "ignore" else fields
    return Converted(make(known), tuple(ignored.names))


def parse_json(data: bytes) -> dict[str, object]:
    """Return the JSON object in `data`; a byte order mark before it is ignored.

    Raises:
        InvalidRequest: `data` is not valid JSON (NaN and lone surrogates are invalid), or not an object.
    """
    try:
        value = _from_json(data.removeprefix(BYTE_ORDER_MARK))
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
    if error["type"] == MISSING:
        return InvalidRequest(f"`{param}` is missing", param, "missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return InvalidRequest(f"`{param}` is not supported", param, "unsupported_parameter")
    message = f"`{param}` {_reason(error)}{_given(error)}"
    return InvalidRequest(message, param, "unsupported_parameter" if error["type"] == UNSUPPORTED else "invalid_value")


def _reason(error: ErrorDetails) -> str:
    """Return the rest of the sentence that begins with the field's name."""
    if error["type"] in (INVALID, CONFLICT, UNSUPPORTED):
        return error["msg"]
    context = {name: _listed(value) if name == "expected" else shown(value) for name, value in _context(error).items()}
    return REASONS.get(error["type"], "has a value that is not accepted").format(**context)


def _context(error: ErrorDetails) -> dict[str, object]:
    """Return the limits that an error names, and the length of the value if it has one."""
    value = error["input"]
    length = {"length": len(value)} if isinstance(value, str | list | dict) else {}
    return error.get("ctx", {}) | length


def _listed(expected: object) -> str:
    """Return the values of a choice, which pydantic gives as Python writes them: `'a', 'b' or 'c'`."""
    options = re.findall(r"'([^']*)'", str(expected)) or [str(expected).lower()]
    return f"{'one of ' if len(options) > 1 else ''}{', '.join(options)}"


def _refusal(names: list[str], ignored: IgnoredValues) -> InvalidRequest:
    if names[0] in REPLACED:
        message = f"`{names[0]}` was replaced by `{REPLACED[names[0]]}`"
        return InvalidRequest(message, names[0], "unsupported_parameter")
    known = [name for name in names if name in ignored]
    listed = ", ".join(f"`{shortened(name)}`" for name in names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        listed += f" and {len(names) - _MAX_NAMES} more"
    param = shortened(names[0])
    if known and len(known) == len(names):
        return InvalidRequest(f"not supported: {listed}", param, "unsupported_parameter")
    return InvalidRequest(f"unknown or not supported: {listed}", param, "unsupported_parameter")


def _path(location: Sequence[int | str]) -> str:
    """Return a field's location in OpenAI's notation, such as `messages[0].content`; tags of unions are left out."""
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{shortened(part)}"
        for part in location
        if not (isinstance(part, str) and part.startswith("<"))
    )
    return path.removeprefix(".")


def _given(error: ErrorDetails) -> str:
    """Return the refused value as text if it is a plain one that the reason lacks, else an empty string."""
    value = error["input"]
    if isinstance(value, bool | int | float | str) and error["type"] not in (CONFLICT, UNSUPPORTED):
        return f"; got {shown(value)}"
    return ""
