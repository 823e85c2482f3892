"""Examples of requests: for each operation commands for a shell and for Python that work as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import indent
from urllib.parse import quote

from serve_app.openai.reply.format import JsonObject
from serve_app.reference.operations import Access, Operation

URL = "http://127.0.0.1:8000"
"""Address of the server in the examples; the page replaces it by its own."""
_PARAMETER = re.compile(r"{([a-z_]+)}")
_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
_PROMPTS = {"prompts": ["The sea", "The moon"], "max_tokens": 16}
_MODEL = "$MODEL"


@dataclass(frozen=True, slots=True)
class _Example:
    """Request of an operation, beyond what its declaration says."""

    body: JsonObject = field(default_factory=dict)
    """JSON body; `$NAME` stands for a value that is known before."""
    form: Mapping[str, str] = field(default_factory=dict)
    """Fields of a form whose file is a batch of one line; empty: the operation has no form."""
    known: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the path with a fixed value."""
    earlier: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Operation whose answer has a variable's value, and the keys to it in that answer, by the variable."""


_ID = {"FILE_ID": ("POST /v1/files", "id")}
_PAIR = {"text_1": "Where is it wet?", "text_2": ["In the sea", "On a mountain"]}
_RANKED = {"query": "Where is it wet?", "documents": ["In the sea", "On a mountain"]}
_ANSWERED = {"REQUEST_ID": ("POST /v1/chat/completions", "id")}
_ITEM = {"type": "message", "role": "user", "content": "Hello!"}
_FIRST_ITEM = {
    "CONVERSATION_ID": ("POST /v1/conversations", "id"),
    "ITEM_ID": ("GET /v1/conversations/{conversation_id}/items", "data 0 id"),
}
_EXAMPLES: Mapping[str, _Example] = {
    "POST /v1/chat/completions": _Example({"model": _MODEL, **_CHAT}),
    "POST /v1/completions": _Example({"model": _MODEL, "prompt": "The sea", "max_tokens": 16}),
    "POST /v1/messages": _Example({"model": _MODEL, **_CHAT}),
    "POST /v1/messages/batches": _Example({"requests": [{"custom_id": "one", "params": {"model": _MODEL, **_CHAT}}]}),
    "POST /v1/messages/count_tokens": _Example({"model": _MODEL, "messages": _CHAT["messages"]}),
    "POST /v1/responses": _Example({"model": _MODEL, "input": "Hello", "max_output_tokens": 64}),
    "POST /v1/responses/input_tokens": _Example({"model": _MODEL, "input": "Hello"}),
    "POST /v1/responses/compact": _Example({"model": _MODEL, "input": "Hello"}),
    "POST /v1/embeddings": _Example({"model": _MODEL, "input": ["The sea", "A mountain"]}),
    **dict.fromkeys(("POST /v1/score", "POST /score"), _Example({"model": _MODEL, **_PAIR})),
    **dict.fromkeys(("POST /v1/rerank", "POST /v2/rerank", "POST /rerank"), _Example({"model": _MODEL, **_RANKED})),
    "GET /v1/models/{model_id}": _Example(known={"model_id": _MODEL}),
    "POST /tokenize": _Example({"model": _MODEL, "prompt": "The sea"}),
    "POST /detokenize": _Example({"model": _MODEL, "tokens": [1, 2, 3]}),
    "GET /v1/requests/{request_id}": _Example(earlier=_ANSWERED),
    "POST /v1/requests/{request_id}/cancel": _Example(earlier=_ANSWERED),
    "POST /v1/files": _Example(form={"purpose": "batch"}),
    "POST /v1/batches": _Example(
        {"input_file_id": "$FILE_ID", "endpoint": "/v1/chat/completions", "completion_window": "24h"}, earlier=_ID
    ),
    "POST /v1/jobs": _Example({"model": _MODEL, **_CHAT}),
    "POST /generate": _Example({"prompt": "The sea", "max_tokens": 16}),
    "POST /v1/batch/async": _Example({"model": _MODEL, **_PROMPTS}),
    "POST /v1/batch/sync": _Example({"model": _MODEL, **_PROMPTS}),
    "POST /v1/replicas/{replica_id}/drain": _Example(earlier={"REPLICA_ID": ("GET /load", "replicas 0 replica_id")}),
    "POST /v1/conversations": _Example(body={"items": [_ITEM]}),
    "POST /v1/conversations/{conversation_id}": _Example(body={"metadata": {"topic": "greetings"}}),
    "POST /v1/conversations/{conversation_id}/items": _Example(body={"items": [_ITEM]}),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": _Example(earlier=_FIRST_ITEM),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": _Example(earlier=_FIRST_ITEM),
    "DELETE /v1/stored/{tenant}": _Example(known={"tenant": "nobody"}),
    "GET /pages/{name}": _Example(known={"name": "base.css"}),
}


class Examples:
    """Examples of the operations of one server, whose model has a name; with API keys they send `$API_KEY`."""

    def __init__(self, operations: Collection[Operation], model_name: str, has_keys: bool) -> None:
        self._operations = {f"{operation.method} {operation.plain_path}": operation for operation in operations}
        self._model_name = model_name
        self._has_keys = has_keys
        self._line = json.dumps(
            {
                "custom_id": "line-1",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": model_name, **_CHAT},
            }
        )

    def body(self, operation: Operation) -> JsonObject | None:
        """Return the JSON body of an operation's example; None: it has none."""
        body = self._example(operation).body
        return {name: self._known(value) for name, value in body.items()} or None

    def parameter(self, operation: Operation, name: str) -> str | None:
        """Return the value of a parameter of the path; None: it depends on what has been created."""
        value = self._example(operation).known.get(name)
        return None if value is None else str(self._known(value))

    def curl(self, operation: Operation) -> str:
        """Return the example for a shell."""
        lines = []
        for variable, (earlier, keys) in self._earlier(operation):
            path = "".join(f"[{key}]" if key.isdigit() else f"[{key!r}]" for key in keys.split())
            read = f'python3 -c "import json, sys; print(json.load(sys.stdin){path})"'
            lines.append(f"{variable}=$({self._curl(earlier)} | {read})")
        return "\n".join([*lines, self._curl(operation)])

    def python(self, operation: Operation) -> str:
        """Return the example for Python with `requests`."""
        lines = ["import os", ""] if self._sends_key(operation) else []
        lines += ["import requests", "", f'url = "{URL}"']
        if self._sends_key(operation):
            lines.append('headers = {"authorization": f"Bearer {os.environ[\'API_KEY\']}"}')
        for variable, (earlier, keys) in self._earlier(operation):
            path = "".join(f"[{key}]" if key.isdigit() else f'["{key}"]' for key in keys.split())
            lines.append(f"{variable.lower()} = {self._python(earlier)}.json(){path}")
        lines.append(f"response = {self._python(operation)}")
        if self._is_endless(operation):
            return "\n".join([*lines, "print(next(response.iter_lines()))"])
        return "\n".join([*lines, "response.raise_for_status()", "print(response.text)"])

    def _example(self, operation: Operation) -> _Example:
        return _EXAMPLES.get(f"{operation.method} {operation.plain_path}", _Example())

    def _earlier(self, operation: Operation) -> Iterator[tuple[str, tuple[Operation, str]]]:
        """Yield the variables of an example and what their values come from, what is needed first first."""
        example = self._example(operation)
        sources = dict(example.earlier)
        for name in _PARAMETER.findall(operation.plain_path):
            if name not in example.known and name.upper() not in sources:
                sources[name.upper()] = self._creator(operation)
        for variable, (key, keys) in sources.items():
            earlier = self._operations[key]
            yield from self._earlier(earlier)
            yield variable, (earlier, keys)

    def _creator(self, operation: Operation) -> tuple[str, str]:
        """Return the operation that creates the object of a path, and the key of its id."""
        for key, creator in self._operations.items():
            if creator.created is not None and operation.plain_path.startswith(creator.created.path):
                return key, creator.created.id_field
        raise LookupError(f"nothing creates what {operation.method} {operation.plain_path} is about")

    def _known(self, value: object) -> object:
        match value:
            case dict():
                return {name: self._known(inner) for name, inner in value.items()}
            case list():
                return [self._known(inner) for inner in value]
            case _:
                return self._model_name if value == _MODEL else value

    def _path(self, operation: Operation, variable: str) -> str:
        """Return a path with its parameters' values or with variables, whose form `variable` gives."""
        known = self._example(operation).known

        def value(match: re.Match[str]) -> str:
            name = match[1]
            return quote(str(self._known(known[name]))) if name in known else variable.format(name)

        return _PARAMETER.sub(value, operation.plain_path)

    def _sends_key(self, operation: Operation) -> bool:
        return self._has_keys and operation.access is not Access.OPEN

    def _is_endless(self, operation: Operation) -> bool:
        return operation.plain_path == "/dashboard/events"

    def _curl(self, operation: Operation) -> str:
        example, body = self._example(operation), self.body(operation)
        path = re.sub(r"\$([a-z_]+)", lambda match: f"${match[1].upper()}", self._path(operation, "${}"))
        parts = [f"curl -s {URL}{path}"]
        if self._is_endless(operation):
            parts = [f"curl -sN -m 3 {URL}{path}"]
        if operation.method == "DELETE" or (operation.method == "POST" and not (body or example.form)):
            parts[0] = parts[0].replace("curl", f"curl -X {operation.method}", 1)
        if self._sends_key(operation):
            parts.append('-H "authorization: Bearer $API_KEY"')
        if body is not None:
            text = json.dumps(body, ensure_ascii=False).replace("'", r"'\''")
            text = re.sub(r'"\$([A-Z_]+)"', r'''"'$\1'"''', text)
            parts += ["-H 'content-type: application/json'", f"-d '{text}'"]
        if example.form:
            parts += [f"-F {name}={value}" for name, value in example.form.items()]
            parts.append("-F 'file=@-;filename=lines.jsonl'")
            quoted = self._line.replace("'", r"'\''")
            return f"echo '{quoted}' \\\n  | " + " \\\n  ".join(parts)
        return " \\\n  ".join(parts)

    def _python(self, operation: Operation) -> str:
        example, body = self._example(operation), self.body(operation)
        path = self._path(operation, "{{{}}}")
        arguments = [f'f"{{url}}{path}"']
        if self._sends_key(operation):
            arguments.append("headers=headers")
        if body is not None:
            text = re.sub(r'"\$([A-Z_]+)"', lambda match: match[1].lower(), json.dumps(body, ensure_ascii=False))
            arguments.append(f"json={text}")
        if example.form:
            arguments.append(f"data={dict(example.form)!r}")
            arguments.append(f'files={{"file": ("lines.jsonl", {self._line!r})}}')
        if self._is_endless(operation):
            arguments.append("stream=True")
        call = f"requests.{operation.method.lower()}"
        if len(arguments) == 1:
            return f"{call}({arguments[0]})"
        return f"{call}(\n" + indent(",\n".join(arguments), "    ") + ",\n)"
