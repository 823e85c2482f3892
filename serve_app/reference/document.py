"""OpenAPI document of the HTTP API, made from the types that validate requests and describe answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.schema import ErrorObject
from serve_app.openai.request.body import IgnoredValues, StrictBody
from serve_app.openai.request.conversation import MESSAGE_IGNORED, ChatMessage
from serve_app.reference.operations import OPERATIONS, Answer, Created, Fields, Operation, Upload
from serve_app.reference.words import ANSWER_HEADERS, DESCRIPTION, FAILURES, FORM_FILE, REQUEST_HEADERS

EVENT_DATA, LINE = "x-event-data", "x-line"
"""Keys of the schemas of a stream's parts: the data of an event of server-sent events, and a line of JSON."""

_REF = "#/components/schemas/"
_NULL = {"type": "null"}
_PATH_PARAMETER = re.compile(r"{([a-z_]+)}")
_EVERYWHERE = frozenset({403, 500})


def api_document(routes: Collection[str], keyed: Collection[str], model_name: str, version: str) -> JsonObject:
    """Return the OpenAPI document of `routes`, of which those in `keyed` require an API key.

    Raises:
        KeyError: a route is not in `OPERATIONS`.
    """
    shown = {plain_route(route): route in keyed for route in routes}
    order = {route: place for place, route in enumerate(OPERATIONS)}
    operations = {route: OPERATIONS[route] for route in sorted(shown, key=order.__getitem__)}
    schemas = Schemas(operations.values(), model_name)
    paths: dict[str, JsonObject] = {}
    for route, operation in operations.items():
        method, path = route.split()
        paths.setdefault(path, {})[method.lower()] = _described(operation, route, shown[route], schemas)
        if operation.created is not None:
            answer = paths[path][method.lower()]["responses"][str(operation.status)]
            answer["links"] = _links(operation.created, operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": version, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": group} for group in dict.fromkeys(operation.group for operation in operations.values())],
        "paths": paths,
        "components": {
            "schemas": schemas.named(),
            "responses": {
                f"Error{status}": _failure(status, schemas) for status in sorted(_statuses(operations.values()))
            },
            "headers": {
                name: {"description": text, "schema": {"type": "string"}} for name, text in ANSWER_HEADERS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class Schemas:
    """Schemas of the types of some operations, by name."""

    def __init__(self, operations: Collection[Operation], model_name: str) -> None:
        self._model = {"type": "string", "enum": [model_name]}
        types = {kind.__name__: kind for operation in operations for kind in _types_of(operation)}
        inputs = [(name, "validation", TypeAdapter(kind)) for name, kind in types.items()]
        found, rest = TypeAdapter.json_schemas(
            inputs,  # type: ignore[arg-type]  # the literal "validation" is inferred as str
            ref_template=_REF + "{model}",
            schema_generator=_Generator,
        )
        self._parts = {kind.__name__ for operation in operations for kind in _parts_of(operation)}
        self.components: dict[str, JsonObject] = dict(rest.get("$defs", {}))
        for (name, _), schema in found.items():
            if "$ref" not in schema:
                self.components[name] = schema

    def named(self) -> dict[str, JsonObject]:
        """Return the schemas that references name; queries, forms and parts of bodies are written where they apply."""
        return {name: schema for name, schema in self.components.items() if name not in self._parts}

    def ref(self, kind: Any) -> JsonObject:
        """Return the reference to the schema of a type."""
        return {"$ref": _REF + kind.__name__} if kind.__name__ in self.components else {"type": "object"}

    def properties(self, kind: type[BaseModel]) -> JsonObject:
        """Return the schemas of a model's fields."""
        found: JsonObject = self.components[kind.__name__]["properties"]
        return found

    def body(self, fields: Fields) -> JsonObject:
        """Return the reference to a body's schema, which is added with the changes that its endpoint makes."""
        title = fields.title or fields.schema.__name__
        schema = copy.deepcopy(self.components[fields.schema.__name__]) | {"title": title}
        if fields.title is not None:
            del schema["description"]
        if "model" in schema["properties"]:
            schema["properties"]["model"] = self._model
        required = list(schema.get("required", ()))
        if fields.added is not None:
            added = self.components[fields.added.__name__]
            schema["properties"] |= copy.deepcopy(added["properties"])
            required += added.get("required", ())
        for name in fields.dropped:
            del schema["properties"][name]
        schema["required"] = [name for name in required if name not in (*fields.dropped, *fields.optional)]
        for name in schema["properties"].keys() - schema["required"]:
            schema["properties"][name] = _or_null(schema["properties"][name])
        for name, limit in (fields.limited or {}).items():
            schema["properties"][name]["anyOf"][0] |= limit
        schema["properties"] |= _ignored(fields.ignored, schema["properties"])
        self.components[title] = schema
        return {"$ref": _REF + title}


class _Generator(GenerateJsonSchema):
    """Generator of schemas in which a field that may be left out may be null, as `StrictBody` has it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        described["description"] = " ".join(described.get("description", "").split())
        if issubclass(schema["cls"], StrictBody):
            for name, field in described["properties"].items():
                if name not in described.get("required", ()):
                    described["properties"][name] = _or_null(field)
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


def plain_route(route: str) -> str:
    """Return a route without the converters of its parameters, such as `:path`."""
    return re.sub(r":[a-z]+}", "}", route)


def _types_of(operation: Operation) -> Iterable[Any]:
    """Yield the types with a schema of their own; a plain mapping has none."""
    yield ErrorObject
    for answer in operation.answers:
        yield from (kind for kind in (answer.schema, *answer.events) if hasattr(kind, "__annotations__"))
    yield from _parts_of(operation)
    if isinstance(operation.body, tuple):
        yield from (fields.schema for fields in operation.body)


def _parts_of(operation: Operation) -> Iterable[type[BaseModel]]:
    """Yield the models whose fields are those of a query, of a form, or further ones of a body."""
    if operation.query is not None:
        yield operation.query
    if isinstance(operation.body, Upload):
        yield operation.body.schema
    elif operation.body is not None:
        yield from (fields.added for fields in operation.body if fields.added is not None)


def _or_null(field: JsonObject) -> JsonObject:
    """Return the schema of a field that may be null; its description and default stay outside."""
    outside = {name: field[name] for name in ("description", "default") if field.get(name) is not None}
    inside = {name: value for name, value in field.items() if name not in ("description", "default")}
    if "description" in outside:
        outside["description"] = " ".join(outside["description"].split())
    options = inside.get("anyOf", [inside])
    return {"anyOf": options if _NULL in options else [*options, _NULL], **outside}


def _ignored(ignored: IgnoredValues, known: Mapping[str, Any]) -> JsonObject:
    """Return the schemas of the fields that are accepted with certain values, and have no effect."""
    return {
        name: {"enum": [*values, None], "description": "Accepted with these values alone; has no effect."}
        for name, values in ignored.items()
        if name not in known
    }


def _id_of(route: str) -> str:
    """Return the id of an operation, such as `get_v1_jobs_job_id`."""
    return "_".join(re.findall(r"[a-z0-9]+", route.lower()))


def _links(created: Created, routes: Iterable[str]) -> JsonObject:
    """Return the links to the operations on a created object."""
    (parameter,) = _PATH_PARAMETER.findall(created.path)
    return {
        _id_of(route): {
            "operationId": _id_of(route),
            "parameters": {parameter: f"$response.body#/{created.id_field}"},
        }
        for route in routes
        if route.split()[1].startswith(created.path)
    }


def _described(operation: Operation, route: str, is_keyed: bool, schemas: Schemas) -> JsonObject:
    failures = operation.failures | _EVERYWHERE | ({401} if is_keyed else frozenset())
    described: JsonObject = {
        "operationId": _id_of(route),
        "tags": [operation.group],
        "summary": operation.summary,
        "parameters": [*_path_parameters(route), *_query(operation, schemas), *_headers(operation)],
        "responses": {
            str(operation.status): _success(operation, schemas),
            **{str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(failures)},
        },
        "security": [{"key": []}] if is_keyed else [],
    }
    if operation.body is not None:
        described["requestBody"] = _request_body(operation.body, schemas)
    return described


def _path_parameters(route: str) -> list[JsonObject]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PATH_PARAMETER.findall(route)
    ]


def _query(operation: Operation, schemas: Schemas) -> list[JsonObject]:
    if operation.query is None:
        return []
    parameters = []
    for name, field in schemas.properties(operation.query).items():
        schema = {key: value for key, value in field.items() if key != "description"}
        if _NULL in schema.get("anyOf", ()):  # a query has no null; the parameter is left out instead
            schema = next(option for option in schema["anyOf"] if option != _NULL)
        text = field.get("description", "")
        parameters.append({"name": name, "in": "query", "schema": schema, "description": " ".join(text.split())})
    return parameters


def _headers(operation: Operation) -> list[JsonObject]:
    return [{"name": name, "in": "header", **REQUEST_HEADERS[name]} for name in sorted(operation.headers)]


def _request_body(body: tuple[Fields, ...] | Upload, schemas: Schemas) -> JsonObject:
    if isinstance(body, Upload):
        return {"required": True, "content": {"multipart/form-data": {"schema": _form(body.schema, schemas)}}}
    options = [schemas.body(fields) for fields in body]
    schema = options[0] if len(options) == 1 else {"oneOf": options}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _form(schema: type[BaseModel], schemas: Schemas) -> JsonObject:
    """Return the schema of a form with a file; the field `b` of the object `a` is the form's field `a[b]`."""
    flat: JsonObject = {"file": FORM_FILE}
    for name, field in schemas.properties(schema).items():
        options = [option for option in field.get("anyOf", [field]) if option != _NULL]
        inner = schemas.components.get(options[0].get("$ref", "").removeprefix(_REF))
        if inner is None:
            flat[name] = options[0]
        else:
            flat |= {f"{name}[{part}]": described for part, described in inner["properties"].items()}
    required = ["file", *schemas.components[schema.__name__]["required"]]
    return {"type": "object", "properties": flat, "required": required, "additionalProperties": False}


def _success(operation: Operation, schemas: Schemas) -> JsonObject:
    content: JsonObject = {}
    for answer in operation.answers:
        content[answer.media_type] = {"schema": _answer_schema(answer, schemas)}
    names = ["x-request-id", "openai-processing-ms"]
    for wanted in operation.answer_headers:
        names += [name for name in ANSWER_HEADERS if name.startswith(wanted)]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": operation.summary, "headers": headers, "content": content}


def _answer_schema(answer: Answer, schemas: Schemas) -> JsonObject:
    if answer.schema is not None:
        return schemas.ref(answer.schema)
    if not answer.events:
        return {"type": "string"}
    options = [schemas.ref(kind) for kind in answer.events]
    if answer.is_done_sent:
        options.append({"const": "[DONE]"})
    is_event_stream = answer.media_type == "text/event-stream"
    # Without `type`: tools disagree if the schema is about the whole text or about one event.
    return {
        "description": "A stream of events." if is_event_stream else "Lines of JSON.",
        EVENT_DATA if is_event_stream else LINE: {"anyOf": options},
    }


def _statuses(operations: Iterable[Operation]) -> frozenset[int]:
    return _EVERYWHERE | {401} | {status for operation in operations for status in operation.failures}


def _failure(status: int, schemas: Schemas) -> JsonObject:
    content = {"application/json": {"schema": schemas.ref(ErrorObject)}}
    return {"description": FAILURES[status], "content": content}
