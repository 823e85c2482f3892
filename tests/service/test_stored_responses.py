"""Stored responses over HTTP: chains, conversations, tenants, and what is read again."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.cli.main import app
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.http.scripted_dispatcher import write_keys

pytestmark = pytest.mark.rotated

MODEL, BLOCK_SIZE = "demo", 16
DEMO = str(Path(__file__).resolve().parents[2] / "replicas" / "demo")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "name": "look", "parameters": NOTHING, "strict": True}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    options = ReplicaOptions(
        ModelOptions(DEMO, dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**24),
        EngineLimits(max_num_seqs=4),
        StreamOptions(),
    )
    settings = IngressSettings(
        model=DEMO, served_model_name=MODEL, api_key_file=write_keys(tmp_path, "acme", "other", "ops", operator="ops")
    )
    async with (
        local_service(options, settings, tmp_path) as local,
        httpx.AsyncClient(base_url=local.url, timeout=60, headers={"authorization": "Bearer acme"}) as client,
    ):
        yield client


async def respond(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0.0, "max_output_tokens": 24, "input": "Hello", **fields}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def test_a_chain_costs_what_the_conversation_sent_whole_costs(http: httpx.AsyncClient) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 64}
    previous: str | None = None
    num_before, was_call = 0, True
    whole: list[dict[str, Any]] = []
    for turn in range(20):
        is_call = turn % 4 == 1
        if turn % 4 == 2:
            call = whole[-1]
            new = [{"type": "function_call_output", "call_id": call["call_id"], "output": f"found {turn}"}]
        else:
            new = [{"type": "message", "role": "user", "content": f"Turn {turn}"}]
        options: dict[str, Any] = {**(forced if is_call else {"tools": [TOOL], "tool_choice": "none"}), "seed": turn}
        whole += new
        # Neither finds what the other has left in the prefix cache.
        chained = await respond(http, input=new, previous_response_id=previous, cache_salt="chain", **options)
        sent = await respond(http, input=whole, store=False, cache_salt="whole", **options)
        assert chained["usage"] == sent["usage"]
        assert texts_of(chained) == texts_of(sent)
        if not (is_call or was_call):  # The prompt has the tools of a forced call alone.
            cached = chained["usage"]["input_tokens_details"]["cached_tokens"]
            assert cached >= (num_before - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
        num_before, was_call = chained["usage"]["total_tokens"], is_call
        whole += chained["output"]
        previous = chained["id"]


def texts_of(response: dict[str, Any]) -> list[str]:
    return [item.get("arguments") or item["content"][0]["text"] for item in response["output"]]


async def test_what_a_client_saw_is_read_again_until_it_is_deleted(http: httpx.AsyncClient) -> None:
    whole = await respond(http, metadata={"a": "b"})
    path = f"/v1/responses/{whole['id']}"
    assert (await http.get(path)).json() == whole and whole["store"]
    stream = await http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "stream": True})
    last = json.loads(stream.text.rstrip().splitlines()[-3].removeprefix("data: "))["response"]
    assert (await http.get(f"/v1/responses/{last['id']}")).json() == last
    items = (await http.get(f"{path}/input_items")).json()["data"]
    assert [(item["role"], item["content"][0]["text"]) for item in items] == [("user", "Hello")]
    assert (await http.delete(path)).json()["deleted"]
    assert (await http.get(path)).json()["error"]["code"] == "response_not_found"
    forgotten = await respond(http, store=False)
    assert not forgotten["store"] and (await http.get(f"/v1/responses/{forgotten['id']}")).status_code == 404


async def test_a_conversation_grows_by_the_items_of_its_responses(http: httpx.AsyncClient) -> None:
    items = [{"type": "message", "role": "user", "content": "Remember 7"}]
    conversation = (await http.post("/v1/conversations", json={"items": items})).json()["id"]
    first = await respond(http, conversation=conversation)
    second = await respond(http, conversation={"id": conversation}, input="And now?")
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    listed = (await http.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"})).json()["data"]
    assert [item["role"] for item in listed] == ["user", "user", "assistant", "user", "assistant"]
    assert listed[2] == first["output"][0]


async def test_an_item_is_sent_by_its_id(http: httpx.AsyncClient) -> None:
    conversation = (await http.post("/v1/conversations", json={})).json()["id"]
    added = {"items": [{"type": "message", "role": "user", "content": "Remember 7"}]}
    given = (await http.post(f"/v1/conversations/{conversation}/items", json=added)).json()["data"]
    first = await respond(http, input=added["items"])
    own = (await http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    question = {"type": "message", "role": "user", "content": "And now?"}
    whole = [*added["items"], *first["output"], question]

    async def count(items: list[Any], key: str = "acme", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "input": items, **fields}
        headers = {"authorization": f"Bearer {key}"}
        return await http.post("/v1/responses/input_tokens", json=body, headers=headers)

    def reference(item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "item_reference", "id": item["id"]}

    expected = (await count(whole)).json()
    for begin in (given, own):
        items = [reference(begin[0]), *map(reference, first["output"]), question]
        assert (await count(items)).json() == expected
        unknown = await count(items, "other")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "item_not_found")
        assert begin[0]["id"] in unknown.json()["error"]["message"]
    # The response has the items themselves.
    second = await respond(http, input=items)
    stored = (await http.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert stored[:-1] == [own[0], *first["output"]]
    after = await count([reference(second["output"][0])], previous_response_id=first["id"])
    assert after.status_code == 200, after.text


async def test_tenants_see_what_they_store_and_operators_delete_it(http: httpx.AsyncClient) -> None:
    await respond(http)
    await respond(http)
    own = (await http.get("/v1/stored")).json()
    assert [(size["tenant"], size["num_responses"]) for size in own["data"]] == [("acme", 2)]
    assert (await http.get("/v1/stored", headers={"authorization": "Bearer other"})).json()["data"] == []
    assert (await http.delete("/v1/stored/acme")).status_code == 403

    async def command(*arguments: str) -> list[list[str]]:
        options = ("--url", str(http.base_url), "--api-key", "ops")
        result = await asyncio.to_thread(CliRunner().invoke, app, ["stored", *arguments, *options])
        assert result.exit_code == 0, result.output
        return [line.split() for line in result.stdout.splitlines()]

    [row] = [line for line in await command("list") if line[0] == "acme"]
    assert row[1:3] == ["2", "0"] and row[-1] == "ago"
    assert await command("delete", "acme") == [
        ["Deleted", "2", "responses", "and", "0", "conversations", "of", "tenant", "acme."]
    ]
    assert (await http.get("/v1/stored")).json()["data"][0]["num_bytes"] == 0


async def test_another_tenant_finds_nothing(http: httpx.AsyncClient) -> None:
    other = {"authorization": "Bearer other"}
    response = (await respond(http, background=True))["id"]
    conversation = (await http.post("/v1/conversations", json={})).json()["id"]
    for method, path in (
        ("GET", f"/v1/responses/{response}"), ("DELETE", f"/v1/responses/{response}"),
        ("POST", f"/v1/responses/{response}/cancel"), ("GET", f"/v1/responses/{response}/input_items"),
        ("GET", f"/v1/responses/{response}?stream=true"), ("GET", f"/v1/conversations/{conversation}"),
        ("DELETE", f"/v1/conversations/{conversation}"), ("GET", f"/v1/conversations/{conversation}/items"),
    ):  # fmt: skip
        assert (await http.request(method, path, headers=other)).status_code == 404, path
    for name, value in (("previous_response_id", response), ("conversation", conversation)):
        body = {"model": MODEL, "input": "Hi", name: value}
        assert (await http.post("/v1/responses", json=body, headers=other)).status_code == 404, name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"background": True, "include": ["message.output_text.logprobs"]}, "background"),
        ({"previous_response_id": "resp_a", "conversation": "conv_a"}, "previous_response_id"),
        ({"previous_response_id": "no id"}, "previous_response_id"),
        ({"conversation": {"id": ""}}, "conversation.id"),
    ],
)
async def test_what_cannot_be_stored_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
