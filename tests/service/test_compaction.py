"""Compaction over HTTP: long conversations go on, and encrypted contents outlive processes but not their tenant."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.http.response_events import checked_response, read_responses
from testkit.http.scripted_dispatcher import write_keys

pytestmark = pytest.mark.rotated

MODEL, CONTEXT = "demo", 512
MAX_SUMMARY_TOKENS = CONTEXT // 4
DEMO = str(Path(__file__).resolve().parents[2] / "replicas" / "demo")
ASK = {"role": "user", "content": "Go on"}


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the demo model with a short context; the folder keeps what outlives the service."""
    options = ReplicaOptions(
        ModelOptions(DEMO, dtype="float32", num_threads=1, max_model_len=CONTEXT),
        RunnerOptions(kv_cache_bytes=2**24),
        EngineLimits(max_num_seqs=4),
        StreamOptions(),
    )
    settings = IngressSettings(model=DEMO, served_model_name=MODEL, api_key_file=write_keys(folder, "acme", "other"))
    async with (
        local_service(options, settings, folder) as local,
        httpx.AsyncClient(base_url=local.url, timeout=120, headers={"authorization": "Bearer acme"}) as client,
    ):
        yield client


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(tmp_path) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str = "/v1/responses", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": [ASK], **fields}
    if path == "/v1/responses":
        body = {"temperature": 0.0, "max_output_tokens": 24, **body}
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def conversation(num_turns: int) -> list[dict[str, Any]]:
    text = "The quick brown fox jumps over the lazy dog and runs home."
    turns = [(f"Question {turn}: {text}", f"Answer {turn}: {text}") for turn in range(num_turns)]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


async def test_a_conversation_longer_than_the_context_is_compacted(http: httpx.AsyncClient) -> None:
    items = [*conversation(30), ASK]
    refused = await http.post("/v1/responses", json={"model": MODEL, "input": items})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    compacted = await post(http, "/v1/responses/compact", input=items, instructions="Be brief.")
    assert compacted["object"] == "response.compaction" and compacted["id"].startswith("resp_")
    *messages, compaction = compacted["output"]
    assert [item["content"][0]["text"] for item in messages] == [item["content"] for item in items[::2]]
    assert 0 < compacted["usage"]["output_tokens"] <= MAX_SUMMARY_TOKENS
    assert compacted["usage"]["input_tokens"] > CONTEXT / 2
    answer = await post(http, input=[*compacted["output"], ASK])
    assert answer["usage"]["input_tokens"] < CONTEXT / 2
    # The summary alone stands for the messages before it.
    alone = await post(http, input=[messages[-1], compaction, ASK])
    assert alone["usage"]["input_tokens"] == answer["usage"]["input_tokens"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["items", "previous", "background"])
async def test_30_turns_beyond_the_context_go_on(http: httpx.AsyncClient, way: str) -> None:
    options: dict[str, Any] = {"context_management": [{"type": "compaction", "compact_threshold": 300}]}
    items: list[dict[str, Any]] = []
    previous, num_compactions, num_tokens = None, 0, 0
    for turn in range(30):
        own = {"type": "message", "role": "user", "content": f"Turn {turn}: tell me of number {turn}, at some length."}
        items.append(own)
        fields: dict[str, Any] = {"input": items, "store": False}
        if way != "items":
            fields = {"input": [own], "previous_response_id": previous}
        if way == "background":
            response = await in_background(http, **fields, **options)
        else:
            response = await post(http, **fields, **options)
        previous, output = response["id"], response["output"]
        items += output
        num_compactions += output[0]["type"] == "compaction"
        num_tokens += response["usage"]["total_tokens"]
        assert [item["type"] for item in output] in (["message"], ["compaction", "message"])
        assert response["usage"]["input_tokens"] <= 300
        sizes = [len(item["encrypted_content"]) for item in output if item["type"] == "compaction"]
        assert all(size < 20 * MAX_SUMMARY_TOKENS for size in sizes)
    assert num_tokens > 4 * CONTEXT and num_compactions >= 3


async def in_background(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Return a response that was made in the background, and is the same in its events, which are read twice."""
    body = {"model": MODEL, "temperature": 0.0, "max_output_tokens": 24, "background": True, "stream": True, **fields}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    stream = checked_response(read_responses(answer.text))
    path = f"/v1/responses/{stream.response['id']}"
    assert (await http.get(path, params={"stream": "true"})).text == answer.text
    stored: dict[str, Any] = (await http.get(path)).json()
    assert stored == stream.response
    return stored


async def test_a_stream_begins_with_the_compaction_and_counts_for_the_tenant(http: httpx.AsyncClient) -> None:
    items = [*conversation(3), ASK]
    management = [{"type": "compaction", "compact_threshold": 100}]
    body = {"model": MODEL, "input": items, "context_management": management, "max_output_tokens": 8, "stream": True}
    stream = checked_response(read_responses((await http.post("/v1/responses", json=body)).text))
    assert [item["type"] for item in stream.output] == ["compaction", "message"]
    path = f"/v1/responses/{stream.response['id']}"
    assert (await http.get(path)).json() == stream.response
    # The next prompt begins as this one did: what is cached of it is used.
    following = await post(http, previous_response_id=stream.response["id"])
    assert following["usage"]["input_tokens_details"]["cached_tokens"] >= stream.response["usage"]["input_tokens"] - 16


async def test_contents_are_read_after_a_restart_and_by_another_ingress(tmp_path: Path) -> None:
    items = conversation(3)
    async with served(tmp_path) as http:
        compacted = (await post(http, "/v1/responses/compact", input=items))["output"]
        own = await post(http, input=[*compacted, ASK])
    async with served(tmp_path) as first, served(tmp_path) as second:
        for http in (first, second):
            answer = await post(http, input=[*compacted, ASK], store=False)
            assert answer["usage"]["input_tokens"] == own["usage"]["input_tokens"]
        chained = await post(second, previous_response_id=own["id"])
        assert chained["usage"]["input_tokens"] > own["usage"]["total_tokens"]
        # OpenAI's SDK sends no `input` where the caller gives none.
        body = {"model": MODEL, "previous_response_id": chained["id"]}
        *messages, compaction = (await second.post("/v1/responses/compact", json=body)).json()["output"]
        assert [message["type"] for message in messages] == ["message"] * len(messages)
        assert compaction["type"] == "compaction"


async def test_contents_of_another_tenant_and_altered_ones_are_refused(http: httpx.AsyncClient) -> None:
    *_, compaction = (await post(http, "/v1/responses/compact", input=conversation(2)))["output"]
    content = compaction["encrypted_content"]
    altered = {**compaction, "encrypted_content": content[:8] + ("a" if content[8] != "a" else "b") + content[9:]}
    body = {"model": MODEL, "store": False, "input": [ASK, compaction]}
    for path in ("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"):
        for headers, item in (({"authorization": "Bearer other"}, compaction), ({}, altered)):
            answer = await http.post(path, json={**body, "input": [ASK, item]}, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                400, "invalid_encrypted_content", "input[1]",
            ), answer.text  # fmt: skip
        assert (await http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"context_management": [{"type": "compaction", "compact_threshold": 0}]},
         "context_management[0].compact_threshold"),
        ({"context_management": [{"type": "other"}]}, "context_management[0].type"),
        ({"context_management": [{"type": "compaction"}] * 2}, "context_management"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
    ],
)  # fmt: skip
async def test_options_that_are_wrong_are_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/responses", json={"model": MODEL, "input": [ASK], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_one_message_beyond_the_context_cannot_be_compacted(http: httpx.AsyncClient) -> None:
    items = [*conversation(1), {"role": "user", "content": json.dumps(list(range(2000)))}]
    for path in ("/v1/responses", "/v1/responses/compact"):
        management: dict[str, Any] = {"context_management": [{"type": "compaction"}]} if path == "/v1/responses" else {}
        answer = await http.post(path, json={"model": MODEL, "input": items, **management})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text
