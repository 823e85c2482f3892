"""Base of the request bodies, the types of errors that their validators raise, and fields that are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

UNSUPPORTED = "unsupported"
"""Type of a schema error for a value that OpenAI's API has and this server does not support."""

INVALID = "invalid"
"""Type of a schema error whose message follows the field's name and ends with the value, where that is a plain one."""

MISSING = "missing"
"""Type of a schema error for a field that is not given."""

CONFLICT = "conflict"
"""Type of a schema error between fields; `param` in its context is the field that the client should change."""

NonEmptyText = Annotated[str, Field(min_length=1)]


class StrictBody(BaseModel):
    """Base of the bodies: strict types, no unknown fields, and null for "not given"."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: object) -> object:
        """Return the fields that are not null, and the first unknown field even if null: pydantic reports each one."""
        if not isinstance(fields, dict):
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first_unknown = next((name for name in fields if name not in known), None)
        return {
            name: value
            for name, value in fields.items()
            if (value is not None and name in known) or name == first_unknown
        }


IgnoredValues = Mapping[str, tuple[object, ...]]
"""Map from a field's name to the values that are accepted and ignored; null always is."""


def without_ignored(fields: Mapping[str, object], ignored: IgnoredValues) -> dict[str, object]:
    """Return `fields` without the unsupported fields whose value is in `ignored` or null."""
    return {
        name: value
        for name, value in fields.items()
        if not (name in ignored and (value is None or is_among(value, ignored[name])))
    }


def is_among(value: object, accepted_values: Sequence[object]) -> bool:
    """Return True if a value equals one of others, where 0 and false, and 1 and true, are not equal."""
    return any(_is_same(value, accepted) for accepted in accepted_values)


def _is_same(value: object, accepted: object) -> bool:
    """Return True for equal values, of which 0 and false, and 1 and true, are none."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
