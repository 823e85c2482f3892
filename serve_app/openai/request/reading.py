"""Reading of a body's bytes: within the limits, as JSON, into a schema."""

from __future__ import annotations

from serve_app.openai.request.body import IgnoredValues
from serve_app.openai.request.parsing import BodyT, parse_body, parse_json
from serve_app.openai.request.sizes import check_fields, check_json
from serve_app.openai.request.validation import RequestLimits


def read_fields(data: bytes, limits: RequestLimits) -> dict[str, object]:
    """Return the fields of a JSON body.

    Raises:
        InvalidRequest: the body is not a JSON object, or has too many values.
    """
    check_json(data, limits)
    fields = parse_json(data)
    check_fields(fields, limits)
    return fields


def read_body(schema: type[BodyT], ignored: IgnoredValues, limits: RequestLimits, data: bytes) -> BodyT:
    """Return a JSON body as a `schema`; a field in `ignored` is accepted with the values listed there.

    Raises:
        InvalidRequest: the body is not a JSON object, has too many values, or does not match the schema.
    """
    return parse_body(schema, read_fields(data, limits), ignored)
