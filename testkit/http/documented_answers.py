"""Check of answers, streams included, against the OpenAPI document of the server that gave them.

Imports nothing of the product, so that other programs can use it on any server's document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

_PARAMETER = re.compile(r"{[a-z_]+}")
_EVENT = re.compile(r"(?:event: (?P<name>.*)\n)?data: (?P<data>.*)")
_ENDS = ('{"error"', '{"type":"error"', '{"type":"message_stop"', '{"type":"response.failed"')
"""Begins of the data of events that end a stream."""
_PATH_OF_SEVERAL_PARTS = "{model_id}"
_MAX_CHECKED_BYTES = 2**18
"""Largest body that an application's checks look at, bytes; they run on its event loop."""


@dataclass(frozen=True)
class Given:
    """Answer as it arrived."""

    method: str
    path: str
    status: int
    content_type: str
    body: bytes
    is_cut: bool = False
    """True if the client left before the end, so that the last part of the body is missing."""


class DocumentedAnswers:
    """The answers that a document allows."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[str, Draft202012Validator] = {}
        patterns = []
        for path in document["paths"]:
            parts = _PARAMETER.sub(lambda found: ".+" if found[0] == _PATH_OF_SEVERAL_PARTS else "[^/]+", path)
            patterns.append((path.count("{"), re.compile(parts), path))
        # `/v1/batch/stats` comes before `/v1/batch/{batch_id}`, which would match it too.
        self._paths = [(pattern, path) for _, pattern, path in sorted(patterns, key=lambda entry: entry[0])]

    def problems(self, given: Given) -> list[str]:
        """Return every way in which an answer is not as documented."""
        operation = self._operation(given)
        where = f"{given.method} {given.path} -> {given.status}"
        if operation is None:
            if given.method in ("HEAD", "OPTIONS"):
                return []
            found = [] if given.status >= 400 else ["succeeds without a description"]
            return [f"{where}: {problem}" for problem in found or self._error(given)]
        return [f"{where}: {problem}" for problem in self._against(operation, given)]

    def _operation(self, given: Given) -> dict[str, Any] | None:
        asked = given.path.removesuffix("/") or "/"  # a trailing slash changes nothing
        for pattern, path in self._paths:
            if pattern.fullmatch(asked):
                found: dict[str, Any] | None = self._document["paths"][path].get(given.method.lower())
                return found
        return None

    def _against(self, operation: dict[str, Any], given: Given) -> Iterator[str]:
        answer = operation["responses"].get(str(given.status))
        if answer is None:
            yield f"the status is not documented; body {given.body[:200]!r}"
            return
        content = self._resolved(answer)["content"]
        media_type = given.content_type.partition(";")[0].strip()
        if media_type not in content:
            yield f"the content type {given.content_type!r} is not documented"
            return
        schema = content[media_type]["schema"]
        if media_type == "application/json":
            yield from self._invalid(schema, given.body)
        elif "x-event-data" in schema:
            yield from self._events(schema["x-event-data"], given)
        elif "x-line" in schema:
            yield from self._lines(schema["x-line"], given)

    def _events(self, schema: dict[str, Any], given: Given) -> Iterator[str]:
        """Check a stream of events: chunks, then their end or one error, and nothing else but comments.

        An event's name is its `type`.
        """
        *parts, rest = given.body.decode().split("\n\n")
        if rest and not given.is_cut:
            yield f"the stream ends within an event: {rest[:200]!r}"
        matches = [_EVENT.fullmatch(part) for part in parts if not part.startswith(":")]
        if None in matches:
            yield "the stream has a line that is neither data nor a comment"
        events = [event for event in matches if event is not None]
        data = [event["data"] for event in events]
        if any(event["name"] is not None and event["name"] != json.loads(event["data"])["type"] for event in events):
            yield "an event's name is not its type"
        for part in data:
            yield from self._invalid(schema, part.encode()) if part != "[DONE]" else ()
        is_end = [part == "[DONE]" or part.startswith(_ENDS) for part in data]
        if any(is_end[:-1]):
            yield "the stream goes on behind its end"
        if not given.is_cut and not (is_end and is_end[-1]):
            yield "the stream has no end"

    def _lines(self, schema: dict[str, Any], given: Given) -> Iterator[str]:
        *lines, rest = given.body.split(b"\n")
        if rest and not given.is_cut:
            yield f"the stream ends within a line: {rest[:200]!r}"
        for line in lines:
            yield from self._invalid(schema, line)

    def _error(self, given: Given) -> list[str]:
        name = "MessageError" if given.path.startswith("/v1/messages") else "ErrorObject"
        return list(self._invalid({"$ref": f"#/components/schemas/{name}"}, given.body))

    def _invalid(self, schema: Mapping[str, Any], body: bytes) -> Iterator[str]:
        try:
            value = json.loads(body, parse_constant=_refuse)
        except ValueError as error:
            yield f"not JSON ({error}): {body[:200]!r}"
            return
        for found in self._validator(schema).iter_errors(value):
            yield f"{found.json_path}: {found.message[:300]}"

    def _validator(self, schema: Mapping[str, Any]) -> Draft202012Validator:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[key] = Draft202012Validator(whole)
        return self._validators[key]

    def _resolved(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in answer:
            return answer
        found: dict[str, Any] = self._document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
        return found


Message = MutableMapping[str, Any]


@dataclass
class CheckedApp:
    """ASGI application whose answers are checked; `problems` collects what is not as documented."""

    app: Callable[..., Awaitable[None]]
    documented: DocumentedAnswers
    problems: list[str] = field(default_factory=list)

    async def __call__(self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        start: Message = {}
        parts: list[bytes] = []
        is_whole = False

        async def noting_send(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                is_whole = not message.get("more_body", False)

        try:
            await self.app(scope, receive, noting_send)
        finally:
            if start and sum(map(len, parts)) <= _MAX_CHECKED_BYTES:
                headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
                self.problems += self.documented.problems(
                    Given(
                        scope["method"],
                        scope["path"],
                        start["status"],
                        headers.get("content-type", ""),
                        b"".join(parts),
                        is_cut=not is_whole,
                    )
                )


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
