"""Outputs keep to their grammar through the whole server, with every other parameter of a request beside it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.structured.structured_outputs import DEMO, MODEL, cases, judged
from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from replicas.text.tokenizer_files import load_tokenizer
from serve_app.cli.clients.events import read_events
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.json_schemas import fault_of

pytestmark = pytest.mark.rotated

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 9}, "b": {"enum": [1, 22]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOKENIZER = load_tokenizer(str(DEMO))


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    options = ReplicaOptions(
        ModelOptions(str(DEMO), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**24),
        EngineLimits(max_num_seqs=8),
    )
    settings = IngressSettings(model=str(DEMO), served_model_name=MODEL)
    async with (
        local_service(options, settings, tmp_path) as local,
        httpx.AsyncClient(base_url=local.url, timeout=60) as client,
    ):
        yield client


def body(**fields: Any) -> dict[str, Any]:
    constraint = {} if {"structured_outputs", "response_format"} & fields.keys() else {"response_format": wanted()}
    return {"model": MODEL, "prompt": "x = ", "max_tokens": 200, "temperature": 1.5, "seed": 5} | constraint | fields


def wanted(schema: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": SCHEMA if schema is None else schema} | fields,
    }


async def complete(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


async def one(http: httpx.AsyncClient, **fields: Any) -> tuple[str, str]:
    (choice,) = await complete(http, **fields)
    return choice["text"], choice["finish_reason"]


async def refusal(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json=body(**fields))
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_thirty_schemas_are_valid_or_refused_by_name() -> None:
    verdicts = await judged(cases(38, None)[8:])
    assert verdicts.faults == []
    assert verdicts.counts["valid"] > 10


@pytest.mark.deep
async def test_three_hundred_schemas_are_valid_or_refused_by_name() -> None:
    assert (await judged(cases(300, 11))).faults == []


async def test_every_form_keeps_to_its_grammar(http: httpx.AsyncClient) -> None:
    lark = 'start: "<" WORD ">"\nWORD: /[a-z]{2,4}/'
    tag = {"type": "structural_tag", "triggers": ["<t"], "structures": [{"begin": "<t>", "schema": {}, "end": "</t>"}]}
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["one", "two", 'a "b"']}, 'one|two|a "b"'),
        ({"grammar": lark}, "<[a-z]{2,4}>"),
        ({"grammar": 'root ::= "a" | "b" "c"+ "d"'}, "a|bc+d"),
        ({"json": {"enum": ["x"]}}, '"x"'),
        ({"json": '{"const": [1, 2]}', "disable_any_whitespace": True}, r"\[1,2\]"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"a":"(?s:.*)","b":(1|22)\}'),
    ]
    for constraint, pattern in forms:
        text, reason = await one(http, structured_outputs=constraint)
        assert reason == "stop" and re.fullmatch(pattern, text), (constraint, text)
    for constraint in ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}):
        (choice,) = await complete(http, **constraint)
        assert choice["text"].startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)
    for constraint in ({"structured_outputs": {"structural_tag": json.dumps(tag)}}, {"response_format": tag}):
        await complete(http, **constraint, max_tokens=20)
    text, _ = await one(http, response_format={"type": "text"}, max_tokens=5)
    assert text


async def test_what_is_wrong_is_refused_by_name(http: httpx.AsyncClient) -> None:
    for constraint, param in [
        ({"regex": "("}, "structured_outputs.regex"), ({"regex": "(?=a)"}, "structured_outputs.regex"),
        ({"grammar": "start: ("}, "structured_outputs.grammar"), ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[1]"}, "structured_outputs.json"), ({"json": {"type": "text"}}, "structured_outputs.json"),
        ({"choice": []}, "structured_outputs.choice"), ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"), ({"other": 1}, "structured_outputs.other"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"), ({"json_object": False}, "structured_outputs"),
        ({"json": '{"const": "\\ud800"}'}, "structured_outputs.json"),
    ]:  # fmt: skip
        error = await refusal(http, structured_outputs=constraint)
        assert error["param"].startswith(param) and param.rpartition(".")[2] in error["message"], (constraint, error)
    error = await refusal(http, response_format=wanted({"items": {"uniqueItems": True}}, strict=True))
    assert error["param"] == "response_format.json_schema.schema" and "`/items/uniqueItems`" in error["message"]
    error = await refusal(http, response_format=wanted(), structured_outputs={"regex": "a"})
    assert error["param"] == "structured_outputs"
    error = await refusal(http, guided_json={}, response_format=None)
    assert "structured_outputs.json" in error["message"]


async def test_what_is_not_enforced_is_named_and_counted(http: httpx.AsyncClient) -> None:
    schema = {"type": "array", "items": {"enum": ["a, b", "c"]}, "maxItems": 2, "uniqueItems": True}
    nested = {"type": "object", "properties": {"é, b/c": schema}, "required": ["é, b/c"], "additionalProperties": False}
    answer = await http.post("/v1/completions", json=body(response_format=wanted(nested)))
    assert answer.headers["x-headway-not-enforced"] == "/properties/%C3%A9%2C%20b~1c/uniqueItems"
    assert answer.json()["warnings"] == ["not enforced: /properties/é, b~1c/uniqueItems"]
    streamed = await http.post("/v1/completions", json=body(response_format=wanted(nested), stream=True))
    assert "uniqueItems" in streamed.headers["x-headway-not-enforced"]
    plain = await http.post("/v1/completions", json=body())
    assert "x-headway-not-enforced" not in plain.headers and "warnings" not in plain.json()
    metrics = (await http.get("/metrics")).text
    assert re.search(r"headway:unenforced_keywords_total\{[^}]*\} 2\.0", metrics)
    for name, value in (("requests_total", 3), ("cache_hits_total", 1), ("cache_size", 2)):
        assert re.search(rf"headway:grammar_{name}\{{[^}}]*\}} {value}\b", metrics), name
    for name, value in (("checks_total", 3), ("check_cache_hits_total", 1), ("check_cache_size", 2)):
        assert re.search(rf"^headway:grammar_{name} {value}\b", metrics, re.M), name


async def test_what_is_not_enforced_is_counted_for_lines_of_batches_too(http: httpx.AsyncClient) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "c"]}, "maxItems": 2, "uniqueItems": True, "contains": {}}
    job = (await http.post("/v1/jobs", json=body(response_format=wanted(schema)))).json()
    ended = (await http.get(f"/v1/jobs/{job['id']}?wait=60")).json()
    assert ended["status"] == "completed" and len(ended["result"]["warnings"]) == 2
    metrics = (await http.get("/metrics")).text
    for name, value in (("unenforced_keywords_total", 2), ("grammar_checks_total", 1), ("grammar_check_cache_size", 1)):
        assert re.search(rf'^headway:{name}\{{[^}}]*process="jobs"[^}}]*\}} {value}\b', metrics, re.M), name


async def test_length_cuts_a_document_and_says_so(http: httpx.AsyncClient) -> None:
    whole, reason = await one(http)
    assert reason == "stop" and fault_of(whole, SCHEMA) is None
    num_tokens = (await http.post("/v1/completions", json=body())).json()["usage"]["completion_tokens"]
    for max_tokens in range(1, num_tokens, 3):
        text, reason = await one(http, max_tokens=max_tokens)
        assert reason == "length" and whole.startswith(text.rstrip("\ufffd")) and text != whole
    assert await one(http, max_tokens=num_tokens) == (whole, "stop"), "the last token both completes it and is the last"


async def test_other_parameters_change_the_document_and_not_its_validity(http: httpx.AsyncClient) -> None:
    comma = TOKENIZER.encode(",", add_special_tokens=False)[0]
    for fields in (
        {"ignore_eos": True}, {"min_tokens": 150}, {"min_tokens": 150, "ignore_eos": True}, {"temperature": 0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.9}, {"top_k": 1}, {"top_p": 0.1},
        {"min_p": 0.9}, {"logit_bias": {str(comma): -100}}, {"logit_bias": {str(comma): 100}},
        {"stop_token_ids": [comma], "min_tokens": 150}, {"echo": False, "logprobs": 3},
    ):  # fmt: skip
        text, reason = await one(http, **fields)
        assert reason == "stop" and fault_of(text, SCHEMA) is None, (fields, text)


async def test_stop_strings_and_tokens_end_a_document_where_they_are(http: httpx.AsyncClient) -> None:
    whole, _ = await one(http)
    (choice,) = await complete(http, stop=[":"])
    assert choice["text"] == whole[: whole.index(":")] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ":", "a client sees by it that the document is cut"
    quote = TOKENIZER.encode('"', add_special_tokens=False)[0]
    (choice,) = await complete(http, stop_token_ids=[quote], structured_outputs={"regex": 'ab"cd'})
    assert (choice["text"], choice["stop_reason"]) == ("ab", quote)
    (choice,) = await complete(http, stop_token_ids=[quote], structured_outputs={"regex": 'ab"cd'}, min_tokens=20)
    assert (choice["text"], choice["stop_reason"]) == ('ab"cd', None), (
        "a grammar that is complete ends before `min_tokens`"
    )


async def test_choices_and_streams_are_each_valid(http: httpx.AsyncClient) -> None:
    choices = await complete(http, n=4, logprobs=2)
    assert len({choice["text"] for choice in choices}) == 4
    for choice in choices:
        assert fault_of(choice["text"], SCHEMA) is None
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    streamed = await http.post("/v1/completions", json=body(n=4, stream=True))
    texts = [""] * 4
    for event in read_events(streamed):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in choices]


async def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(http: httpx.AsyncClient) -> None:
    """The lexer's limit is met in mid-output, after the check; beside it an ordinary document is finished."""
    exhausting = body(structured_outputs={"regex": "(a{1,100}){60,100}b"}, max_tokens=1000)
    refused, streamed, beside = await asyncio.gather(
        http.post("/v1/completions", json=exhausting),
        http.post("/v1/completions", json=exhausting | {"stream": True}),
        http.post("/v1/completions", json=body()),
    )
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error" and "too complex" in error["message"]
    assert error["message"] in streamed.text
    assert fault_of(beside.json()["choices"][0]["text"], SCHEMA) is None
