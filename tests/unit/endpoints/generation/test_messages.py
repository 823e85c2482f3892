"""POST /v1/messages and /v1/messages/count_tokens: answers, events, errors and counts in Anthropic's form."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from replicas.errors import Overloaded, ServingError
from serve_app.openai.request.validation import RequestLimits
from testkit.http.api import MODEL, REPLY, Api, MakeApi, card_of, scripted
from testkit.http.message_events import MessageStream, checked, read_messages
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import until
from testkit.model.scripted_checkpoint import CHAT_TEMPLATE
from tests.seeds import Seeds

TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
THINKING = {"type": "adaptive"}
_PARTS = (
    "Let me look.", " <b>{x}</b> ", CALL, f"{CALL}\n", "<tool_call>", "wörld 👋", "\n\n",
    '<tool_call>\n{"name": "nobody"',
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
)  # fmt: skip

Writes = Callable[[str], None]


@pytest.fixture
def agent(make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Api:
    """Return an application whose model reasons and calls tools; a test sets what it writes."""
    template = tmp_path / "template.jinja"
    shown = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}"
    template.write_text(CHAT_TEMPLATE.replace("{{ message.content or '' }}", shown + "{{ message.content or '' }}"))
    card = card_of(tokenizer, max_model_len=4096)
    return make_api(settings={"chat_template": str(template)}, dispatcher={"card": card})


@pytest.fixture
def writes(agent: Api, tokenizer: PreTrainedTokenizerFast) -> Writes:
    """Return the function that lets the agent's model write a text and end."""

    def write(text: str) -> None:
        agent.replica.script = scripted(tokenizer, text)
        agent.replica.stops_at = len(agent.replica.script)

    return write


async def send(api: Api, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hello"}]
    return await api.post("/v1/messages", {"model": MODEL, "max_tokens": 900, "messages": messages, **fields})


async def both(api: Api, **fields: Any) -> tuple[dict[str, Any], MessageStream]:
    """Return a whole answer, and the same as a stream."""
    whole, streamed = await send(api, **fields), await send(api, stream=True, **fields)
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
    return whole.json(), checked(read_messages(streamed.text))


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name not in ("id", "signature")} for block in content]


async def test_an_answer_is_a_message_whole_and_streamed(api: Api) -> None:
    api.replica.cached_tokens = 3
    whole, stream = await both(api, max_tokens=len(api.replica.script), system="be brief")
    assert whole["content"] == [{"type": "text", "text": REPLY}] == stream.message["content"]
    assert whole.keys() == stream.message.keys() and whole["usage"] == stream.message["usage"]
    assert whole["stop_reason"] == "max_tokens" == stream.message["stop_reason"]
    usage, prompt = whole["usage"], api.replica.started[0].prompt_token_ids
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (3, 0)
    assert usage["output_tokens"] == len(api.replica.script)


async def test_thinking_text_and_calls_are_blocks_in_their_order(agent: Api, writes: Writes) -> None:
    writes(f"<think>\nhm, look\n</think>\n\nLet me look. {CALL}\n{CALL}")
    whole, stream = await both(agent, tools=[TOOL], thinking=THINKING)
    call = {"type": "tool_use", "name": "look", "input": {"at": "the sky"}}
    expected = [{"type": "thinking", "thinking": "hm, look"}, {"type": "text", "text": "Let me look."}, call, call]
    assert [block | {"thinking": block["thinking"].strip()} if "thinking" in block else block
            for block in without_ids(whole["content"])] == expected  # fmt: skip
    assert without_ids(stream.whole_content) == without_ids(whole["content"])
    assert len({block["id"] for block in whole["content"] if "id" in block}) == 2
    assert whole["content"][0]["signature"] == f"{whole['id']}-0"
    assert whole["stop_reason"] == "tool_use" == stream.message["stop_reason"]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_reasoning_that_is_not_asked_for_is_hidden(agent: Api, writes: Writes) -> None:
    writes("<think>\nhm\n</think>\n\nYes.")
    whole, stream = await both(agent)
    assert whole["content"] == [{"type": "text", "text": "Yes."}] == stream.message["content"]


async def test_the_history_with_its_thoughts_and_results_is_in_the_prompt(agent: Api, writes: Writes) -> None:
    writes(f"<think>\nhm\n</think>\n\n{CALL}")
    first = (await send(agent, tools=[TOOL], thinking=THINKING)).json()
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "blue"}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert (await send(agent, messages=messages, tools=[TOOL], thinking=THINKING)).status_code == 200
    before, after = (request.prompt_token_ids for request in agent.replica.started)
    tokens = await agent.post("/detokenize", {"tokens": list(after)})
    text = tokens.json()["prompt"]
    assert before == after[: len(before)]
    assert "<think>\nhm" in text and '{"at": "the sky"}' in text
    assert text.index("<tool_response>\nblue") < text.index("and?")


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ("Done.", {}, ("end_turn", None)),
        ("Done", {"stop_sequences": ["."]}, ("stop_sequence", ".")),
        ("Done.", {"max_tokens": 1}, ("max_tokens", None)),
    ],
)
async def test_the_reason_of_the_end(
    agent: Api, writes: Writes, script: str, fields: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    writes(script)
    agent.replica.stop_reason = expected[1]
    whole, stream = await both(agent, **fields)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert (stream.message["stop_reason"], stream.message["stop_sequence"]) == expected


async def test_more_tokens_than_the_context_holds_are_lowered_and_told(api: Api) -> None:
    reply = (await send(api, max_tokens=32_000)).json()
    request = api.replica.started[0]
    assert reply["stop_reason"] == "model_context_window_exceeded"
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids) == reply["usage"]["output_tokens"]
    too_long = await send(api, max_tokens=5, messages=[{"role": "user", "content": "the quick " * 300}])
    assert too_long.status_code == 400 and too_long.json()["error"]["type"] == "invalid_request_error"
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 255 maximum", too_long.json()["error"]["message"])


async def test_a_keys_limit_lowers_max_tokens(make_api: MakeApi, tmp_path: Path) -> None:
    path = write_keys(tmp_path, "acme")
    keys = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({key: owner | {"max_tokens": 7} for key, owner in keys.items()}))
    api = make_api(settings={"api_key_file": path})
    body = {"model": MODEL, "max_tokens": 32_000, "messages": [{"role": "user", "content": "hello"}]}
    reply = (await api.post("/v1/messages", body, x_api_key="acme")).json()
    assert (reply["usage"]["output_tokens"], reply["stop_reason"]) == (7, "max_tokens")
    refused = await api.post("/v1/messages", body, x_api_key="other")
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (await api.post("/v1/messages", body, authorization="Bearer acme", x_api_key="other")).status_code == 200


async def test_a_count_is_the_number_of_prompt_tokens_with_tools(agent: Api, writes: Writes) -> None:
    writes("Yes.")
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "system": "brief"}
    search = {"type": "web_search_20250305", "name": "web_search"}
    for extra in ({}, {"tools": [TOOL, search]}, {"thinking": THINKING}):
        count = await agent.post("/v1/messages/count_tokens", fields | extra)
        usage = (await send(agent, **(fields | extra))).json()["usage"]
        assert count.json() == {"input_tokens": usage["input_tokens"]}
    assert count.headers["request-id"] == count.headers["x-request-id"]
    named = await agent.post("/v1/messages/count_tokens", fields | {"tools": [TOOL, search]})
    assert named.headers["x-headway-ignored-tools"] == "web_search_20250305"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after_s=3.0), 429, "rate_limit_error"),
        (ServingError("scripted failure"), 500, "api_error"),
    ],
)
async def test_an_error_has_anthropics_shape_before_and_in_a_stream(
    api: Api, error: ServingError, status: int, kind: str
) -> None:
    api.replica.error, api.replica.fail_at = error, 0
    failed = await send(api, stream=True)
    given = failed.json()
    assert (failed.status_code, given["type"], given["error"]["type"]) == (status, "error", kind)
    assert given["request_id"] == failed.headers["request-id"] and given["error"]["message"] == str(error.message)
    assert ("retry-after" in failed.headers) is (status == 429)
    api.replica.fail_at = 2
    stream = checked(read_messages((await send(api, stream=True)).text))
    assert stream.state == "failed" and stream.error is not None
    assert stream.error["type"] == kind


async def test_errors_of_the_path_have_its_shape(api: Api) -> None:
    other_type = await api.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
    wrong_method = await api.http.get("/v1/messages")
    unknown = await api.post("/v1/messages/other", {})
    unknown_model = await send(api, model="other")
    for response, status, kind in (
        (other_type, 415, "invalid_request_error"),
        (wrong_method, 405, "invalid_request_error"),
        (unknown, 404, "not_found_error"),
        (unknown_model, 404, "not_found_error"),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert response.headers["request-id"]


async def test_a_silent_stream_sends_pings(make_api: MakeApi) -> None:
    api = make_api(settings={"max_header_wait_s": 0.02, "keep_alive_s": 0.02}, ttft_s=0.1)
    stream = read_messages((await send(api, stream=True, max_tokens=2)).text)
    assert stream[0] == ("ping", {"type": "ping"})
    assert checked(stream).state == "stopped"


async def test_what_is_ignored_is_named(api: Api) -> None:
    fields = {
        "context_management": {"edits": []},
        "nonsense": 1,
        "tools": [{"type": "web_fetch_20250910", "name": "w"}],
    }
    response = await send(api, max_tokens=2, **fields)
    assert response.headers["x-headway-ignored"] == "context_management, nonsense"
    assert response.headers["x-headway-ignored-tools"] == "web_fetch_20250910"


async def test_a_thread_is_refused_with_the_code_on_which_clients_send_all_messages(api: Api) -> None:
    refused = await send(api, thread={"type": "create"})
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_unknown_fields_are_refused_where_they_are_to_be(make_api: MakeApi) -> None:
    api = make_api(settings={"limits": RequestLimits(unknown_fields="refuse")})
    assert (await send(api, max_tokens=2, nonsense=1)).status_code == 400
    assert (await send(api, max_tokens=2, service_tier="auto")).status_code == 200


async def test_models_have_the_shape_that_the_version_asks_for(api: Api) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    models = (await api.http.get("/v1/models", headers=headers)).json()
    [model] = models["data"]
    assert (models["first_id"], models["has_more"], model["id"]) == (MODEL, False, MODEL)
    assert (model["type"], model["max_input_tokens"]) == ("model", 256)
    assert (await api.http.get(f"/v1/models/{MODEL}", headers=headers)).json() == model
    assert (await api.http.get(f"/v1/models/{MODEL}")).json()["object"] == "model"


async def test_a_client_that_leaves_ends_its_message(api: Api) -> None:
    api.replica.gate, api.replica.gate_at = asyncio.Event(), 3
    task = asyncio.create_task(send(api, stream=True))
    await until(lambda: api.replica.num_deltas >= 3)
    task.cancel()
    await until(lambda: bool(api.replica.aborted))
    assert not api.replica.running


async def test_a_message_is_cancelled_by_its_id(api: Api) -> None:
    api.replica.gate, api.replica.gate_at = asyncio.Event(), 3
    task = asyncio.create_task(send(api, stream=True))
    await until(lambda: api.replica.num_deltas >= 3)
    reply_id = api.replica.started[0].request_id.rpartition("-")[0]
    assert reply_id.startswith("msg_")
    assert (await api.post(f"/v1/requests/{reply_id}/cancel", {})).status_code == 200
    stream = checked(read_messages((await task).text))
    assert (stream.state, api.replica.running) == ("failed", set())


def random_text(rng: random.Random) -> str:
    """Return an output with reasoning, text and calls, each perhaps; some calls are malformed or cut off."""
    parts = [rng.choice(("", "", "<think>\nhm {} hm\n</think>\n\n", "<think>\n\n</think>\n", "<think>\nnever ends"))]
    parts += rng.choices(_PARTS, k=rng.randint(0, 4))
    return "".join(parts)


async def cancelled(api: Api, number: int, fields: dict[str, Any]) -> httpx.Response:
    """Return the stream of a message that is cancelled in its middle."""
    replica = api.replica
    replica.gate, replica.gate_at, replica.num_deltas = asyncio.Event(), len(replica.script) // 2, 0
    body = {"model": MODEL, "max_tokens": 900, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    streaming = asyncio.create_task(api.post("/v1/messages", body | fields, x_request_id=f"request-{number}"))
    num_before = replica.gate_at // replica.tokens_per_delta
    await until(lambda: replica.num_deltas >= num_before or streaming.done())
    await api.post(f"/v1/requests/request-{number}/cancel", {})
    replica.gate.set()
    replica.gate = None
    return await streaming


@pytest.mark.random_worlds(750, per_call=125)
async def test_the_events_of_random_answers_keep_their_order(agent: Api, writes: Writes, seeds: Seeds) -> None:
    ends = []
    for seed in seeds:
        rng = random.Random(seed)
        replica, text = agent.replica, random_text(rng)
        writes(text or "x")
        replica.tokens_per_delta = rng.choice((1, 2, 7))
        replica.stop_reason = rng.choice((None, None, "stop!"))
        replica.fail_at = rng.randrange(len(replica.script)) if rng.random() < 0.15 else None
        replica.cached_tokens = rng.randint(0, 5)
        fields: dict[str, Any] = {"tools": [TOOL]} if rng.random() < 0.8 else {}
        if rng.random() < 0.7:
            fields["thinking"] = THINKING
        if rng.random() < 0.2:
            fields["max_tokens"] = rng.randint(1, len(replica.script) + 1)
        if replica.stop_reason is not None:
            fields["stop_sequences"] = [replica.stop_reason]
        is_cancelled = replica.fail_at is None and rng.random() < 0.1
        streamed = await (cancelled(agent, seed, fields) if is_cancelled else send(agent, stream=True, **fields))
        if streamed.status_code != 200:
            expected = (499, "error") if is_cancelled else (500, "error")
            assert (streamed.status_code, streamed.json()["type"]) == expected, streamed.text
            assert is_cancelled or replica.fail_at is not None
            continue
        stream = checked(read_messages(streamed.text))
        ends.append(stream.message.get("stop_reason") if stream.state == "stopped" else f"failed {is_cancelled}")
        if stream.state == "failed" or seed % 4:
            continue
        assert stream.state == "stopped"
        whole = (await send(agent, **fields)).json()
        assert [block["type"] for block in whole["content"]] == [block["type"] for block in stream.message["content"]]
        assert (whole["stop_reason"], whole["usage"]) == (stream.message["stop_reason"], stream.message["usage"])
        if whole["stop_reason"] == "tool_use":
            assert without_ids(whole["content"]) == without_ids(stream.whole_content)
        for block, other in zip(whole["content"], stream.message["content"], strict=True):
            for name in ("text", "thinking", "name"):
                assert block.get(name) == other.get(name)
    all_ends = {"end_turn", "stop_sequence", "tool_use", "max_tokens", "failed False", "failed True"}
    assert not seeds.are_many or all_ends <= set(ends), set(ends)
