"""Reading of a body's bytes: within the limits, as JSON, into a schema."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.openai.request.body import IgnoredValues
from serve_app.openai.request.parsing import BodyT, parse_body, parse_json
from serve_app.openai.request.sizes import check_fields, check_json
from serve_app.openai.request.validation import RequestLimits


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


def read_body(schema: type[BodyT], ignored: IgnoredValues, limits: RequestLimits, parts: Sequence[bytes]) -> BodyT:
    """Return a JSON body as a `schema`; a field in `ignored` is accepted with the values listed there.

    Raises:
        InvalidRequest: the body is not a JSON object, has too many values, or does not match the schema.
    """
    return parse_body(schema, read_fields(parts, limits), ignored)
