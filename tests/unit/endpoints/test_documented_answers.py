"""The checker of answers finds what is not documented, in whole answers and in streams."""

import json
from typing import Any

import pytest

from testkit.http.documented_answers import DocumentedAnswers, Given

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
EVENT = {"anyOf": [NUMBER, {"$ref": "#/components/schemas/ErrorObject"}, {"const": "[DONE]"}]}
CONTENT = {
    "application/json": {"schema": NUMBER},
    "text/event-stream": {"schema": {"type": "string", "x-event-data": EVENT}},
    "application/x-ndjson": {"schema": {"type": "string", "x-line": NUMBER}},
}
DOCUMENTED = DocumentedAnswers(
    {
        "paths": {"/a/{id}": {"get": {"responses": {"200": {"content": CONTENT}}}}},
        "components": {"schemas": {"ErrorObject": ERROR}},
    }
)


def problems(body: str, content_type: str = "application/json", **changes: Any) -> str:
    given: dict[str, Any] = {"method": "GET", "path": "/a/5", "status": 200, **changes}
    return "\n".join(DOCUMENTED.problems(Given(**given, content_type=content_type, body=body.encode())))


def stream(*events: str) -> str:
    return "".join(f"{event}\n\n" for event in events)


def test_documented_answers_have_no_problem() -> None:
    assert not problems('{"n": 1}')
    assert not problems('{"error": "gone"}', path="/b", status=404)
    assert not problems(stream(": wait", 'data: {"n": 1}', "data: [DONE]"), "text/event-stream; charset=utf-8")
    assert not problems(stream('data: {"error": "late"}'), "text/event-stream")
    assert not problems(stream('data: {"n": 1}') + "data: {", "text/event-stream", is_cut=True)
    assert not problems('{"n": 1}\n{"n": 2}\n', "application/x-ndjson")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"body": '{"n": "1"}'}, "is not of type 'integer'"),
        ({"body": '{"n": 1, "m": 2}'}, "'m' was unexpected"),
        ({"body": '{"n": NaN}'}, "not JSON"),
        ({"body": "{}", "status": 201}, "status is not documented"),
        ({"body": "1", "content_type": "text/plain"}, "content type 'text/plain' is not documented"),
        ({"body": '{"detail": 1}', "path": "/b", "status": 404}, "'error' is a required property"),
        ({"body": "{}", "path": "/b"}, "succeeds without a description"),
    ],
)
def test_undocumented_answers_are_found(given: dict[str, Any], problem: str) -> None:
    assert problem in problems(**given)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (['data: {"n": 1}'], "no end"),
        ([], "no end"),
        (["data: [DONE]", 'data: {"n": 1}'], "behind its end"),
        (['data: {"error": "late"}', "data: [DONE]"], "behind its end"),
        (["event: x", "data: [DONE]"], "neither data nor a comment"),
        (['data: {"m": 1}', "data: [DONE]"], "not valid"),
    ],
)
def test_bad_streams_are_found(events: list[str], problem: str) -> None:
    assert problem in problems(stream(*events), "text/event-stream")


def test_a_line_of_a_stream_must_be_whole() -> None:
    assert "ends within a line" in problems(json.dumps({"n": 1}), "application/x-ndjson")
