"""Schemas of the fields that constrain an output: `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.openai.request.body import INVALID, NonEmptyText, StrictBody

MAX_CHOICES = 1024
"""Most texts of `structured_outputs.choice`."""

JsonSchemaObject = dict[str, Any]


def _schema_or_bool(value: object) -> object:
    if not isinstance(value, dict | bool):
        raise PydanticCustomError(INVALID, "must be an object or a boolean")
    return value


def _schema_or_text(value: object) -> object:
    if not isinstance(value, dict | str):
        raise PydanticCustomError(INVALID, "must be an object or a string")
    return value


SchemaOrBool = Annotated[
    JsonSchemaObject | bool, PlainValidator(_schema_or_bool, json_schema_input_type=JsonSchemaObject | bool)
]
SchemaOrText = Annotated[
    JsonSchemaObject | str, PlainValidator(_schema_or_text, json_schema_input_type=JsonSchemaObject | str)
]


class TextFormat(StrictBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictBody):
    """JSON Schema that the output must meet."""

    name: NonEmptyText
    description: str | None = None
    schema_: SchemaOrBool = Field(default_factory=dict, alias="schema")
    """The schema; without one, any JSON."""
    strict: bool = False
    """True if a keyword that cannot be enforced is an error. Otherwise a header of the answer names it."""


class JsonSchemaFormat(StrictBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class TagStructure(StrictBody):
    """Text between two markers that must meet a JSON Schema."""

    begin: NonEmptyText
    """Marker before the text; it begins with one of the triggers."""
    schema_: JsonSchemaObject = Field(default_factory=dict, alias="schema")
    end: str
    """Marker behind the text."""


class StructuralTag(StrictBody):
    """Free text in which marked parts must meet JSON Schemas, as in vLLM."""

    type: Literal["structural_tag"]
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=128)]
    triggers: Annotated[list[NonEmptyText], Field(min_length=1, max_length=128)]
    """Texts that must begin a marked part."""

    @model_validator(mode="after")
    def _markers_begin_with_triggers(self) -> StructuralTag:
        for index, structure in enumerate(self.structures):
            if not any(structure.begin.startswith(trigger) for trigger in self.triggers):
                raise PydanticCustomError(
                    INVALID,
                    "has a `structures[{index}].begin` that begins with none of its `triggers`",
                    {"index": index},
                )
        return self


def _kind(value: object) -> str | None:
    """Return the tag of a response format; it is in brackets, so that an error's path can leave it out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTag, Tag("<structural_tag>")],
    Discriminator(
        _kind,
        custom_error_type=INVALID,
        custom_error_message="must be an object whose `type` is text, json_object, json_schema or structural_tag",
    ),
]


class StructuredOutputs(StrictBody):
    """Constraint of the output, exactly one of these."""

    json_: SchemaOrText | None = Field(None, alias="json")
    """JSON Schema, as an object or as its text."""
    regex: NonEmptyText | None = None
    """Regular expression that the whole output matches."""
    choice: Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """Texts of which the output is one."""
    grammar: NonEmptyText | None = None
    """Context-free grammar in Lark's syntax, or in GBNF."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    structural_tag: NonEmptyText | None = None
    """Text of a JSON object of type `structural_tag`."""
    disable_any_whitespace: bool = False
    """True if JSON has no whitespace between its tokens."""

    @model_validator(mode="after")
    def _has_one_constraint(self) -> StructuredOutputs:
        given = [
            name
            for name in ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            names = ", ".join(name.removesuffix("_") for name in given) or "none"
            raise PydanticCustomError(
                INVALID,
                "must have exactly one of json, regex, choice, grammar, json_object and structural_tag; it has {names}",
                {"names": names},
            )
        return self
