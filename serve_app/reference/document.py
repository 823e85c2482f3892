"""OpenAPI document of the HTTP API, made from the types that validate requests and describe answers."""

from __future__ import annotations

import re
from collections.abc import Collection
from types import UnionType
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.schema import ErrorObject
from serve_app.openai.request.body import IgnoredValues, StrictBody
from serve_app.openai.request.conversation import MESSAGE_IGNORED, ChatMessage
from serve_app.openai.request.unknown_fields import OPEN_SCHEMAS
from serve_app.protocols.messages.batches import OPEN_MESSAGE_BATCHES
from serve_app.protocols.messages.schema import OPEN_MESSAGES
from serve_app.protocols.responses.schema import OPEN_RESPONSES
from serve_app.reference.examples import Examples
from serve_app.reference.operations import Access, Created, Fields, Operation
from serve_app.reference.words import ANSWER_HEADERS, DESCRIPTION, FAILURES, FORM_FILE, NO_EFFECT, REQUEST_HEADERS

EVENT_DATA, LINE = "x-event-data", "x-line"
"""Keys of the schemas of a stream's parts: the data of an event of server-sent events, and a line of JSON."""

_FIRST_FIELDS = ("model", "messages", "prompt")
_REF = "#/components/schemas/"
_NULL = {"type": "null"}
_PATH_PARAMETER = re.compile(r"{([a-z_]+)}")
_EVERYWHERE = frozenset({403, 500})


def api_document(operations: Collection[Operation], has_keys: bool, model_name: str, version: str) -> JsonObject:
    """Return the OpenAPI document of operations, which require an API key if there are keys and they are not open."""
    schemas, examples = Schemas(model_name), Examples(operations, model_name, has_keys)
    paths: dict[str, JsonObject] = {}
    for operation in operations:
        described = _described(operation, has_keys, schemas, examples)
        if operation.created is not None:
            described["responses"][str(operation.status)]["links"] = _links(operation.created, operations)
        paths.setdefault(operation.plain_path, {})[operation.method.lower()] = described
    error = {"application/json": {"schema": schemas.of(ErrorObject)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": version, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": group} for group in dict.fromkeys(operation.group for operation in operations)],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.components.items())),
            "responses": {
                f"Error{status}": {"description": text, "content": error} for status, text in FAILURES.items()
            },
            "headers": {
                name: {"description": text, "schema": {"type": "string"}} for name, text in ANSWER_HEADERS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class Schemas:
    """Schemas of the types that a document names, in `components`."""

    def __init__(self, model_name: str) -> None:
        self._model = {"type": "string", "enum": [model_name]}
        self.components: dict[str, JsonObject] = {}

    def of(self, kind: Any) -> JsonObject:
        """Return the schema of a type: the reference to its own, which is added, if the type has a name."""
        if isinstance(kind, UnionType):
            return {"anyOf": [self.of(option) for option in kind.__args__]}
        if kind.__name__ in self.components:
            return {"$ref": _REF + kind.__name__}
        schema = self.inline(kind)
        return self._named(schema) if "title" in schema else schema

    def body(self, fields: Fields) -> JsonObject:
        """Return the reference to a body's schema, which is added with the changes that its endpoint makes."""
        schema = self.inline(fields.schema)
        properties, required = schema["properties"], schema.get("required", [])
        if fields.title is not None:
            schema["title"] = fields.title
            del schema["description"]
        if "model" in properties:
            properties["model"] = self._model
        if fields.added is not None:
            added = self.inline(fields.added)
            properties |= added["properties"]
            required += added.get("required", ())
        for name in fields.dropped:
            del properties[name]
        schema["required"] = [name for name in required if name not in (*fields.dropped, *fields.optional)]
        for name in properties.keys() - schema["required"]:
            properties[name] = _or_null(properties[name])
        for name, limit in (fields.limited or {}).items():
            properties[name]["anyOf"][0] |= limit
        properties |= _ignored(fields.ignored, properties)
        required_first = sorted(properties, key=lambda name: name not in schema["required"])
        names = dict.fromkeys([*filter(properties.__contains__, _FIRST_FIELDS), *required_first])
        schema["properties"] = {name: properties[name] for name in names}
        return self._named(schema)

    def inline(self, kind: Any) -> JsonObject:
        """Return the schema of a type in full; those that it refers to are added."""
        schema = TypeAdapter(kind).json_schema(ref_template=_REF + "{model}", schema_generator=_Generator)
        for name, definition in schema.pop("$defs", {}).items():
            assert self.components.setdefault(name, definition) == definition, f"two types are named {name}"
        return schema

    def _named(self, schema: JsonObject) -> JsonObject:
        self.components[schema["title"]] = schema
        return {"$ref": _REF + schema["title"]}


class _Generator(GenerateJsonSchema):
    """Generator of schemas in which a field that may be left out may be null, as `StrictBody` has it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        described["description"] = " ".join(described.get("description", "").split())
        if issubclass(schema["cls"], StrictBody):
            for name in described["properties"].keys() - described.get("required", ()):
                described["properties"][name] = _or_null(described["properties"][name])
        if schema["cls"] in (*OPEN_SCHEMAS, *OPEN_MESSAGES, *OPEN_MESSAGE_BATCHES, *OPEN_RESPONSES):
            del described["additionalProperties"]
        if issubclass(schema["cls"], ChatMessage):
            described["properties"] |= _ignored(MESSAGE_IGNORED, described["properties"])
        return described

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        described = super().typed_dict_schema(schema)
        for part in (described, *described["properties"].values()):
            if "description" in part:
                part["description"] = " ".join(part["description"].split())
        return described

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _or_null(field: JsonObject) -> JsonObject:
    """Return the schema of a field that may be null; its description and default stay outside."""
    outside = {name: field[name] for name in ("description", "default") if field.get(name) is not None}
    inside = {name: value for name, value in field.items() if name not in ("description", "default")}
    if "description" in outside:
        outside["description"] = " ".join(outside["description"].split())
    options = inside.get("anyOf", [inside])
    return {"anyOf": options if _NULL in options else [*options, _NULL], **outside}


def _ignored(ignored: IgnoredValues, known: Collection[str]) -> JsonObject:
    """Return the schemas of the fields that are accepted with certain values, and have no effect."""
    return {
        name: {"enum": [*values, None], "description": NO_EFFECT}
        for name, values in ignored.items()
        if name not in known
    }


def _id_of(operation: Operation) -> str:
    """Return the id of an operation, such as `get_v1_jobs_job_id`."""
    return "_".join(re.findall(r"[a-z0-9]+", f"{operation.method} {operation.plain_path}".lower()))


def _links(created: Created, operations: Collection[Operation]) -> JsonObject:
    """Return the links to the operations on a created object."""
    (parameter,) = _PATH_PARAMETER.findall(created.path)
    given = {parameter: f"$response.body#/{created.id_field}"}
    ids = [_id_of(operation) for operation in operations if operation.path.startswith(created.path)]
    return {id_: {"operationId": id_, "parameters": given} for id_ in ids}


def _described(operation: Operation, has_keys: bool, schemas: Schemas, examples: Examples) -> JsonObject:
    is_keyed = has_keys and operation.access is not Access.OPEN
    failures = operation.failures | _EVERYWHERE | ({401} if is_keyed else frozenset())
    described: JsonObject = {
        "operationId": _id_of(operation),
        "tags": [operation.group],
        "summary": operation.summary,
        "parameters": _parameters(operation, schemas, examples),
        "responses": {
            str(operation.status): _success(operation, schemas),
            **{str(status): _failure(status, operation, schemas) for status in sorted(failures)},
        },
        "security": [{"key": []}] if is_keyed else [],
        "x-codeSamples": [
            {"lang": "Shell", "label": "curl", "source": examples.curl(operation)},
            {"lang": "Python", "label": "Python", "source": examples.python(operation)},
        ],
    }
    if operation.form is not None:
        form = {"multipart/form-data": {"schema": _form(operation.form, schemas)}}
        described["requestBody"] = {"required": True, "content": form}
    elif operation.bodies:
        options = [schemas.body(fields) for fields in operation.bodies]
        schema = options[0] if len(options) == 1 else {"oneOf": options}
        content = {"schema": schema, "example": examples.body(operation)}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _parameters(operation: Operation, schemas: Schemas, examples: Examples) -> list[JsonObject]:
    parameters: list[JsonObject] = []
    for name in _PATH_PARAMETER.findall(operation.plain_path):
        value = examples.parameter(operation, name)
        example = {} if value is None else {"example": value}
        parameters.append(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}, **example}
        )
    for name, field in ({} if operation.query is None else schemas.inline(operation.query)["properties"]).items():
        text = " ".join(field.pop("description", "").split())
        if _NULL in field.get("anyOf", ()):  # a query has no null; the parameter is left out instead
            field = next(option for option in field["anyOf"] if option != _NULL)
        parameters.append({"name": name, "in": "query", "schema": field, "description": text})
    return parameters + [{"name": name, "in": "header", **REQUEST_HEADERS[name]} for name in sorted(operation.headers)]


def _form(kind: type[BaseModel], schemas: Schemas) -> JsonObject:
    """Return the schema of a form with a file; the field `b` of the object `a` is the form's field `a[b]`."""
    form = schemas.inline(kind)
    flat: JsonObject = {"file": FORM_FILE}
    for name, field in form["properties"].items():
        option = field.get("anyOf", [field])[0]
        inner = schemas.components.get(option.get("$ref", "").removeprefix(_REF))
        if inner is None:
            flat[name] = option
        else:
            flat |= {f"{name}[{part}]": described for part, described in inner["properties"].items()}
    return {
        "type": "object",
        "properties": flat,
        "required": ["file", *form["required"]],
        "additionalProperties": False,
    }


def _success(operation: Operation, schemas: Schemas) -> JsonObject:
    content = {} if operation.answer is None else {"application/json": {"schema": schemas.of(operation.answer)}}
    for media_type, parts in operation.other_answers.items():
        content[media_type] = {"schema": _stream_of(media_type, parts, schemas) if parts else {"type": "string"}}
    names = ["x-request-id", "openai-processing-ms", *(["x-headway-ignored"] if operation.bodies else [])]
    names += [name for name in ANSWER_HEADERS if name.startswith(operation.answer_headers)]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": operation.summary, "headers": headers, "content": content}


def _failure(status: int, operation: Operation, schemas: Schemas) -> JsonObject:
    if operation.error is None:
        return {"$ref": f"#/components/responses/Error{status}"}
    content = {"application/json": {"schema": schemas.of(operation.error)}}
    return {"description": FAILURES[status], "content": content}


def _stream_of(media_type: str, parts: Collection[Any], schemas: Schemas) -> JsonObject:
    is_event_stream = media_type == "text/event-stream"
    # Without `type`: tools disagree if the schema is about the whole text or about one event.
    return {
        "description": "A stream of events." if is_event_stream else "Lines of JSON.",
        EVENT_DATA if is_event_stream else LINE: {"anyOf": [schemas.of(kind) for kind in parts]},
    }
