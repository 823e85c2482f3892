"""Outputs that a grammar binds, and the fields of vLLM that choose tokens, with a real model behind HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from serve_app.cli.clients.events import read_events
from testkit.model.tiny_checkpoints import write_checkpoint
from tests.service.conftest import MODEL, Service, serving

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for the description of a tool."""
    return write_checkpoint(tmp_path_factory.mktemp("long") / MODEL, max_position_embeddings=2048)


@pytest.fixture
async def service(checkpoint: Path) -> AsyncIterator[Service]:
    async with serving(checkpoint, kv_cache_bytes=2**22) as served:
        yield served


async def post(service: Service, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    start = {"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": MODEL, "max_tokens": 200, "temperature": 1.5, **start, **fields}
    return await service.http.post(f"/v1/{path}", json=body)


def schema_format(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}


async def test_documents_meet_their_schema_and_the_header_names_the_rest(service: Service) -> None:
    asked = [post(service, seed=seed, response_format=schema_format(PERSON)) for seed in range(8)]
    for response in await asyncio.gather(*asked):
        assert response.status_code == 200, response.text
        assert response.headers["x-headway-not-enforced"] == "/properties/tags/uniqueItems"
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "stop"
        enforced = {**PERSON, "properties": {**PERSON["properties"], "tags": {"type": "array"}}}
        jsonschema.validate(json.loads(choice["message"]["content"]), enforced)
    strict = await post(service, response_format=schema_format(PERSON, strict=True))
    error = strict.json()["error"]
    assert (strict.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert "/properties/tags/uniqueItems" in error["message"]


async def test_streams_and_text_completions_are_bound_alike(service: Service) -> None:
    whole = await post(service, "completions", seed=3, structured_outputs={"regex": "[a-c]{3}-[0-9]+"}, n=3)
    for choice in whole.json()["choices"]:
        assert choice["finish_reason"] == "length" or re.fullmatch("[a-c]{3}-[0-9]+", choice["text"])
        assert re.match("[a-c]{3}-[0-9]", choice["text"])
    chosen = await post(service, "completions", structured_outputs={"choice": ["yes", "no"]})
    assert chosen.json()["choices"][0]["text"] in ("yes", "no")
    stream = await post(service, stream=True, seed=1, response_format=schema_format(PERSON))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in read_events(stream))
    same = await post(service, seed=1, response_format=schema_format(PERSON))
    assert text == same.json()["choices"][0]["message"]["content"]


async def test_a_document_that_is_cut_ends_with_length(service: Service) -> None:
    response = await post(service, max_tokens=4, response_format=schema_format(PERSON))
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_required_calls_are_valid_calls(service: Service, choice: Any, stream: bool) -> None:
    response = await post(
        service, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, stream=stream, seed=5
    )  # fmt: skip
    assert response.status_code == 200, response.text
    if stream:
        parts = [event["choices"] for event in read_events(response)]
        deltas = [call for (one,) in parts for call in one["delta"].get("tool_calls", [])]
        name, arguments = deltas[0]["function"]["name"], "".join(call["function"]["arguments"] for call in deltas)
        assert deltas[0]["id"].startswith("call_") and parts[-1][0]["finish_reason"] == "tool_calls"
    else:
        (made,) = response.json()["choices"]
        (call,) = made["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])


async def test_only_allowed_tokens_are_sampled_and_bad_words_never(service: Service) -> None:
    body = {"stream": False, "return_token_ids": True, "ignore_eos": True, "max_tokens": 40}
    allowed = await post(service, "completions", allowed_token_ids=[70, 71, 72], **body)
    assert set(allowed.json()["choices"][0]["token_ids"]) <= {70, 71, 72}
    free = await post(service, "completions", temperature=0, **body)
    (word,) = (await service.http.post("/tokenize", json={"prompt": " lazy", "add_special_tokens": False})).json()[
        "tokens"
    ]
    bound = await post(service, "completions", temperature=0, bad_words=["lazy"], logit_bias={str(word): 100}, **body)
    biased = await post(service, "completions", temperature=0, logit_bias={str(word): 100}, **body)
    tokens = [each.json()["choices"][0]["token_ids"] for each in (free, bound, biased)]
    assert word in tokens[2] and word not in tokens[1]


async def test_prompts_are_truncated_and_scored(service: Service) -> None:
    prompt = list(range(5, 45))
    response = await post(
        service, "completions", prompt=prompt, truncate_prompt_tokens=6, prompt_logprobs=2, return_token_ids=True,
        return_tokens_as_token_ids=True, logprobs=1, max_tokens=2, temperature=0,
    )  # fmt: skip
    (choice,) = response.json()["choices"]
    assert choice["prompt_token_ids"] == prompt[-6:] and response.json()["usage"]["prompt_tokens"] == 6
    beginning = await post(
        service, "completions", prompt=prompt, truncate_prompt_tokens=6, truncation_side="right", max_tokens=1,
        return_token_ids=True,
    )  # fmt: skip
    assert beginning.json()["choices"][0]["prompt_token_ids"] == prompt[:6]
    first, *scored = choice["prompt_logprobs"]
    assert first is None and len(scored) == 5
    for token_id, ranked in zip(prompt[-5:], scored, strict=True):
        assert str(token_id) in ranked and sorted(each["rank"] for each in ranked.values() if each["rank"]) == [1, 2]
    assert all(re.fullmatch("token_id:[0-9]+", name) for name in choice["logprobs"]["tokens"])
    refused = await post(service, stream=True, prompt_logprobs=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_the_tokenizer_is_described(service: Service) -> None:
    info = (await service.http.get("/tokenizer_info")).json()
    assert info["tool_call_parser"] and info["vocab_size"] > 0
