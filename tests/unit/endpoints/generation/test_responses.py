"""Responses: whole and streamed answers, tools, reasoning, errors and counts."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from replicas.errors import ServingError
from serve_app.jobs.api.errors import storage_unavailable
from testkit.http.api import MODEL, REPLY, Api, MakeApi, card_of, events, refusal, scripted
from testkit.http.response_events import checked_response, read_responses
from testkit.limits import until
from testkit.model.scripted_checkpoint import CHAT_TEMPLATE
from tests.seeds import Seeds

pytestmark = pytest.mark.rotated

FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
NO_REGEX = {"type": "grammar", "syntax": "regex", "definition": "("}
USER = {"type": "message", "role": "user", "content": "hello"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'

Writes = Callable[[str], None]


@pytest.fixture
def agent(make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Api:
    """Return an application whose model reasons and calls tools; a test sets what it writes."""
    template = tmp_path / "template.jinja"
    shown = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}"
    template.write_text(CHAT_TEMPLATE.replace("{{ message.content or '' }}", shown + "{{ message.content or '' }}"))
    card = card_of(tokenizer, max_model_len=4096)
    return make_api(
        settings={"chat_template": str(template)}, dispatcher={"card": card}, stops_at=4, stores_responses=True
    )


@pytest.fixture
def writes(agent: Api, tokenizer: PreTrainedTokenizerFast) -> Writes:
    """Return the function that lets the agent's model write a text and end."""

    def write(text: str) -> None:
        agent.replica.script = scripted(tokenizer, text)
        agent.replica.stops_at = len(agent.replica.script)

    return write


def prompt_of(api: Api, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the prompt of the last request that the replica got."""
    return str(tokenizer.decode(api.replica.started[-1].prompt_token_ids))


_PARTS = (
    "Let me look.", " <b>{x}</b> ", CALL, f"{CALL}\n", "<tool_call>", "wörld 👋", "\n\n",
    '<tool_call>\n{"name": "run", "arguments": {"input": "a \\"b\\" \\ud83d\\udc4b \\n"}}\n</tool_call>',
    '<tool_call>\n{"name": "nobody"', '<tool_call>\n{"name": "run", "arguments": {"in',
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
)  # fmt: skip


async def respond(api: Api, **fields: Any) -> httpx.Response:
    return await api.post("/v1/responses", {"model": MODEL, "input": "hello", "store": False, **fields})


def stream_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return a stream's events before `[DONE]`."""
    *data, last = events(response.text)
    assert last == "[DONE]", last
    return [json.loads(event) for event in data]


async def test_a_whole_response_has_a_message_and_repeats_its_request(make_api: MakeApi) -> None:
    api = make_api(stops_at=12, cached_tokens=16)
    response = await respond(api, instructions="be kind", metadata={"a": "b"}, max_output_tokens=40, user="u")
    reply = response.json()
    assert response.status_code == 200 and "x-headway-ignored" not in response.headers
    (item,) = reply["output"]
    assert item["content"][0]["text"] == REPLY[: len(item["content"][0]["text"])] != ""
    assert (reply["status"], item["status"], item["id"]) == ("completed", "completed", f"msg_{reply['id'][5:]}_0")
    assert (reply["instructions"], reply["metadata"], reply["user"]) == ("be kind", {"a": "b"}, "u")
    assert (reply["max_output_tokens"], reply["store"], reply["tools"]) == (40, False, [])
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] == 16
    assert reply["usage"]["output_tokens"] == 12
    prompt = api.replica.started[0].prompt_token_ids
    assert reply["usage"]["input_tokens"] == len(prompt)


async def test_a_stream_ends_in_the_whole_response(make_api: MakeApi) -> None:
    api = make_api(stops_at=12)
    whole = (await respond(api)).json()
    streamed = stream_of(await respond(api, stream=True))
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in streamed))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    last = streamed[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    deltas = [event["delta"] for event in streamed if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"] and len(deltas) > 1


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs between two of one request."""
    output = [{**item, "id": None, "call_id": None} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "completed_at": None, "output": output}


async def test_a_response_that_is_not_stored_needs_no_storage(make_api: MakeApi) -> None:
    api = make_api(stores_responses=True)
    assert (await respond(api, max_output_tokens=2, store=True)).json()["store"] is True
    api.jobs.error = storage_unavailable(is_full=False)
    refused = await respond(api, max_output_tokens=2, store=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
    assert "retry-after" in refused.headers
    answered = await respond(api, max_output_tokens=2, store=False)
    assert (answered.status_code, answered.json()["store"]) == (200, False)


async def test_a_limit_leaves_the_response_incomplete(api: Api) -> None:
    reply = (await respond(api, max_output_tokens=3)).json()
    assert (reply["status"], reply["output"][0]["status"]) == ("incomplete", "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"} and reply["completed_at"] is None
    last = stream_of(await respond(api, max_output_tokens=3, stream=True))[-1]
    assert last["type"] == "response.incomplete"


async def test_log_probabilities_are_those_of_the_text(make_api: MakeApi) -> None:
    api = make_api(stops_at=6, tokens_per_delta=2)
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await respond(api, **fields)).json()["output"][0]["content"][0]["logprobs"]
    assert len(whole) == 6 and len(whole[0]["top_logprobs"]) == 2
    streamed = stream_of(await respond(api, **fields, stream=True))
    deltas = [event["logprobs"] for event in streamed if event["type"] == "response.output_text.delta"]
    assert [position for delta in deltas for position in delta] == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_an_item_with_its_namespace(
    agent: Api, writes: Writes, tokenizer: PreTrainedTokenizerFast, stream: bool
) -> None:
    writes(CALL.replace("weather", "sky.weather"))
    tools = [{"type": "namespace", "name": "sky", "description": "Above.", "tools": [FUNCTION]}]
    response = await respond(agent, tools=tools, stream=stream)
    reply = stream_of(response)[-1]["response"] if stream else response.json()
    (item,) = reply["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "weather", "sky")
    assert json.loads(item["arguments"]) == {"city": "Paris"} and item["status"] == "completed"
    assert item["call_id"].startswith("call_") and item["id"].startswith("fc_")
    prompt = prompt_of(agent, tokenizer)
    assert '"sky.weather"' in prompt and "Above." in prompt
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    await respond(agent, tools=tools, input=[{"role": "user", "content": "hello"}, item, output])
    assert CALL.replace("weather", "sky.weather") in prompt_of(agent, tokenizer)


async def test_a_custom_call_is_plain_text(agent: Api, writes: Writes) -> None:
    writes('<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"é\\")\\n"}}\n</tool_call>')
    tools = [{"type": "custom", "name": "run"}]
    streamed = stream_of(await respond(agent, tools=tools, stream=True))
    (item,) = streamed[-1]["response"]["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", 'print("é")\n')
    deltas = [event["delta"] for event in streamed if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == item["input"] and len(deltas) > 1
    assert (await respond(agent, tools=tools)).json()["output"][0]["input"] == item["input"]


@pytest.mark.parametrize("options", [{}, {"summary": "auto"}, {"effort": "low"}])
async def test_reasoning_is_an_item_that_comes_back(
    agent: Api, writes: Writes, tokenizer: PreTrainedTokenizerFast, options: dict[str, str]
) -> None:
    writes("<think>\nI see.\n</think>\n\nYes.")
    fields = {"reasoning": options, "include": ["reasoning.encrypted_content"]}
    reply = stream_of(await respond(agent, **fields, stream=True))[-1]["response"]
    thought, answer = reply["output"]
    (part,) = thought["summary" if "summary" in options else "content"]
    assert part["text"].strip() == "I see." and answer["content"][0]["text"] == "Yes."
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    sent_back = (thought, {**thought, "summary": [], "content": []}, {**thought, "encrypted_content": None})
    for item in sent_back:
        await respond(
            agent, input=[{"role": "user", "content": "hello"}, item, answer, {"role": "user", "content": "?"}]
        )
        assert f"<think>\n{part['text']}\n</think>\nYes." in prompt_of(agent, tokenizer)
    for content in ("gAAAAA==", "é", thought["encrypted_content"][1:]):
        foreign: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": content}
        refused = await respond(agent, input=[{"role": "user", "content": "?"}, foreign])
        assert refusal(refused) == (400, "invalid_encrypted_content", "input[1]")


async def test_a_failure_ends_the_stream_with_the_response_up_to_there(make_api: MakeApi) -> None:
    api = make_api(fail_at=5, error=ServingError("broken"))
    response = await respond(api, stream=True)
    *_, last = [json.loads(event) for event in events(response.text)]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "type": "internal_error", "message": "broken"}
    assert last["response"]["output"][0]["status"] == "in_progress"
    assert refusal(await respond(api))[0] == 500


async def test_tools_of_the_server_are_left_out_by_name(api: Api) -> None:
    tools = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
    response = await respond(api, tools=tools)
    assert response.headers["x-headway-ignored-tools"] == "web_search, image_generation"
    assert response.headers["x-headway-ignored"] == "tools.0.external_web_access"
    forced = await respond(api, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
    assert refusal(forced) == (400, "unsupported_parameter", "tool_choice")


async def test_keywords_that_are_not_enforced_have_their_place_in_the_request(agent: Api) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    namespace = {"type": "namespace", "name": "n", "tools": [{**FUNCTION, "parameters": parameters}]}
    response = await respond(agent, tools=[{"type": "web_search"}, FUNCTION, namespace])
    place = "/tools/2/tools/0/parameters/properties/a/uniqueItems"
    assert response.headers["x-headway-not-enforced"] == place


async def test_counts_are_those_of_the_prompt(agent: Api) -> None:
    fields = {"input": [{"role": "user", "content": "hello"}], "instructions": "be kind", "tools": [FUNCTION]}
    usage = (await respond(agent, **fields)).json()["usage"]
    counted = await agent.post("/v1/responses/input_tokens", fields)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "hello " * 4000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"input": [{"role": "user", "content": "x"}] * 3000}, "input"),
        ({"model": "other"}, "model"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"top_logprobs": 500}, "top_logprobs"),
        ({"previous_response_id": "no id"}, "previous_response_id"),
        ({"tools": [{"type": "custom", "name": "c", "format": NO_REGEX}]}, "tools[0].format.definition"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{**FUNCTION, "parameters": {"type": "x"}}]}]},
         "tools[0].tools[0].parameters"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "[1"}]},
         "input[0].arguments"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text.format.schema"),
    ],
)  # fmt: skip
async def test_errors_name_the_field_of_the_request(agent: Api, fields: dict[str, Any], param: str) -> None:
    response = await respond(agent, **fields)
    assert refusal(response)[::2] == (404 if param == "model" else 400, param), response.text


def turn(number: int, words: int = 40) -> list[dict[str, Any]]:
    """Return a turn with a call and its output."""
    call = {"type": "function_call", "call_id": f"c{number}", "name": "weather", "arguments": '{"city": "Paris"}'}
    output = {"type": "function_call_output", "call_id": f"c{number}", "output": f"<output {number}> " + "so " * words}
    return [{"role": "user", "content": f"<question {number}>"}, call, output, {"role": "assistant", "content": "ok"}]


async def test_the_first_messages_are_dropped_until_the_rest_fits(
    agent: Api, writes: Writes, tokenizer: PreTrainedTokenizerFast
) -> None:
    writes("Yes.")
    items = [item for number in range(60) for item in turn(number)] + [{"role": "user", "content": "<last>"}]
    refused = await respond(agent, input=items, instructions="be kind", max_output_tokens=200)
    assert refusal(refused) == (400, "context_length_exceeded", "input")
    fields = {"instructions": "be kind", "max_output_tokens": 200, "truncation": "auto"}
    for stream in (False, True):
        response = await respond(agent, input=items, **fields, stream=stream)
        reply = stream_of(response)[-1]["response"] if stream else response.json()
        assert (reply["truncation"], "x-headway-ignored" in response.headers) == ("auto", False)
        prompt = prompt_of(agent, tokenizer)
        num_dropped = next(number for number in range(60) if f"<question {number}>" in prompt)
        assert 0 < num_dropped < 59 and "be kind" in prompt and "<last>" in prompt
        for number in range(60):
            shown = [text in prompt for text in (f"<question {number}>", f"<output {number}>")]
            assert shown == [number >= num_dropped] * 2
    num_tokens = len(agent.replica.started[-1].prompt_token_ids)
    assert num_tokens + 200 <= 4096 < num_tokens + 200 + 4096 / (60 - num_dropped), "no more than needed is dropped"
    again = await respond(agent, input=items[num_dropped * 4 :], **{**fields, "truncation": "disabled"})
    assert again.status_code == 200
    assert agent.replica.started[-1].prompt_token_ids == agent.replica.started[-2].prompt_token_ids


async def test_the_last_message_of_the_user_stays_before_the_calls_that_follow_it(
    agent: Api, writes: Writes, tokenizer: PreTrainedTokenizerFast
) -> None:
    writes("Yes.")
    calls = [item for number in range(60) for item in turn(number)[1:3]]
    first, wrong = {"role": "user", "content": "<only>"}, {**calls[-2], "arguments": "[1"}
    assert (await respond(agent, input=[first, *calls], truncation="auto")).status_code == 200
    prompt = prompt_of(agent, tokenizer)
    assert "<only>" in prompt and "<output 59>" in prompt and "<output 0>" not in prompt
    assert prompt.count("<tool_call>") == prompt.count("<output ")
    error = await respond(agent, input=[first, *calls[:-2], wrong, calls[-1]], truncation="auto")
    assert refusal(error)[::2] == (400, "input[119].arguments")
    too_long = await respond(agent, input=[first, {"role": "user", "content": "so " * 9000}], truncation="auto")
    assert refusal(too_long) == (400, "context_length_exceeded", "input")


_REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "truncation", "parallel_tool_calls", "text", "top_p", "tool_choice",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""Fields that Open Responses requires of a response (openresponses.org)."""
_NUMBERS = ("top_p", "presence_penalty", "frequency_penalty", "temperature", "top_logprobs", "created_at")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "written", "kind"),
    [
        ({}, "One two three.", "message"),
        ({"input": [{"type": "message", "role": "system", "content": "Arr."}, USER]}, "Arr!", "message"),
        ({"tools": [FUNCTION]}, CALL, "function_call"),
        ({"input": [USER, {"type": "message", "role": "assistant", "content": "Hello!"}, USER]}, "Alice.", "message"),
    ],
)
async def test_the_requests_of_the_open_specifications_tests(
    agent: Api, writes: Writes, fields: dict[str, Any], written: str, kind: str, stream: bool
) -> None:
    writes(written)
    response = await respond(agent, **{"input": [USER], **fields, "stream": stream})
    reply = checked_response(read_responses(response.text)).response if stream else response.json()
    assert reply.keys() >= _REQUIRED and (reply["status"], reply["output"][-1]["type"]) == ("completed", kind)
    assert all(type(reply[name]) in (int, float) for name in _NUMBERS)
    given = (
        reply["tools"][0] if reply["tools"] else dict.fromkeys(("type", "name", "description", "parameters", "strict"))
    )
    assert {"type", "name", "description", "parameters", "strict"} <= given.keys()


def random_text(rng: random.Random) -> str:
    """Return what a model may write: reasoning, text and calls, whole ones and broken ones."""
    thought = rng.choice(("", "", "<think>\nI see.\n</think>\n\n", "<think>", "<think>\nHm"))
    return thought + "".join(rng.choices(_PARTS, k=rng.randint(0, 4)))


def random_fields(rng: random.Random, num_tokens: int) -> dict[str, Any]:
    """Return fields of a request whose answer has about so many tokens."""
    fields: dict[str, Any] = {"tools": [FUNCTION, {"type": "custom", "name": "run"}]} if rng.random() < 0.8 else {}
    if rng.random() < 0.3:
        fields["reasoning"] = {"summary": "auto"}
    if rng.random() < 0.3:
        # A whole answer shows the tokens of its texts only if it has no calls.
        with_logprobs = [] if fields else ["message.output_text.logprobs"]
        fields["include"] = ["reasoning.encrypted_content", *with_logprobs]
    if rng.random() < 0.2:
        refusal_part = {"type": "refusal", "refusal": "I cannot."}
        fields["input"] = [USER, {"type": "message", "role": "assistant", "content": [refusal_part]}, USER]
    if rng.random() < 0.2:
        fields["max_output_tokens"] = rng.randint(1, num_tokens + 1)
    return fields


async def cancelled(api: Api, number: int, fields: dict[str, Any]) -> httpx.Response:
    """Return the stream of a response that is cancelled in its middle."""
    replica = api.replica
    replica.gate, replica.gate_at, request_id = asyncio.Event(), len(replica.script) // 2, f"request-{number}"
    replica.num_deltas = 0
    body = {"model": MODEL, "input": "hello", "store": False, "stream": True, **fields}
    streaming = asyncio.create_task(api.post("/v1/responses", body, x_request_id=request_id))
    num_before = replica.gate_at // replica.tokens_per_delta
    await until(lambda: replica.num_deltas >= num_before or streaming.done())
    await api.post(f"/v1/requests/{request_id}/cancel", {})
    replica.gate.set()
    replica.gate = None
    return await streaming


@pytest.mark.random_worlds(750, per_call=125)
async def test_the_events_of_random_responses_keep_their_order(agent: Api, writes: Writes, seeds: Seeds) -> None:
    ends = []
    for seed in seeds:
        rng, replica = random.Random(seed), agent.replica
        writes(random_text(rng) or "x")
        replica.tokens_per_delta = rng.choice((1, 2, 7))
        replica.stop_reason = rng.choice((None, None, "stop!"))
        replica.fail_at = rng.randrange(len(replica.script)) if rng.random() < 0.15 else None
        fields = random_fields(rng, len(replica.script))
        if replica.stop_reason is not None:
            fields["stop"] = [replica.stop_reason]
        is_cancelled = replica.fail_at is None and rng.random() < 0.1
        response = await (cancelled(agent, seed, fields) if is_cancelled else respond(agent, stream=True, **fields))
        if response.status_code != 200:
            assert response.status_code == (499 if is_cancelled else 500), response.text
            continue
        stream = checked_response(read_responses(response.text))
        ends.append(f"{stream.state} {(stream.response['error'] or {}).get('type')}")
        if stream.state == "failed" or seed % 4:
            continue
        whole = (await respond(agent, **fields)).json()
        assert without_ids(whole) == without_ids(stream.response)
    failures = {"failed internal_error", "failed request_aborted"}
    assert not seeds.are_many or {"completed None", "incomplete None", *failures} <= set(ends), set(ends)
