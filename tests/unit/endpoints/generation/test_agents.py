"""Both protocols of agents go the way of chats: headers, limits, traces and usage."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from replicas.errors import Overloaded
from replicas.protocol import Band
from router.types import Headroom
from serve_app.keys.key_file import digest_of
from serve_app.tracing.settings import TracingSettings
from serve_app.tracing.tracer import Tracer
from testkit.http.api import MODEL, Api, MakeApi, card_of
from testkit.otlp_receiver import otlp_receiver

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
PLACE = "/properties/a/uniqueItems"
HEADROOM = Headroom(1024, 24, 4_000_000, 1500, wait_s=360.0)
STANDARD = {
    "x-ratelimit-limit-requests": "1024",
    "x-ratelimit-limit-tokens": "4000000",
    "x-ratelimit-remaining-requests": "1000",
    "x-ratelimit-remaining-tokens": "3998500",
    "x-ratelimit-reset-requests": "6m0s",
    "x-ratelimit-reset-tokens": "6m0s",
}


@dataclass(frozen=True)
class Protocol:
    """Path of a protocol, and the fields of its requests."""

    path: str
    body: dict[str, Any]
    tool: dict[str, Any]
    format: dict[str, Any]
    place: str
    """Place in the request of the schema of the tool."""

    async def send(self, api: Api, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await api.post(self.path, {"model": MODEL, **self.body, **fields}, **(headers or {}))


MESSAGES = Protocol(
    "/v1/messages",
    {"messages": [{"role": "user", "content": "hello secret"}], "max_tokens": 4},
    {"name": "look", "input_schema": SCHEMA},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/tools/0/input_schema",
)
RESPONSES = Protocol(
    "/v1/responses",
    {"input": "hello secret", "max_output_tokens": 4},
    {"type": "function", "name": "look", "parameters": SCHEMA},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "/tools/0/parameters",
)
pytestmark = pytest.mark.parametrize("protocol", [MESSAGES, RESPONSES], ids=lambda protocol: protocol.path)


def rate_limits(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit-")}


def kind_of(response: httpx.Response) -> tuple[int, str]:
    """Return the status of a refusal, and its type in the protocol's body."""
    body = response.json()
    assert ("type" in body) == (response.request.url.path == "/v1/messages")
    return response.status_code, body["error"]["type"]


@pytest.mark.parametrize("stream", [False, True])
async def test_keywords_that_are_not_enforced_have_their_place(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, protocol: Protocol, stream: bool
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=4096)})
    for fields, place in (({"tools": [protocol.tool]}, protocol.place + PLACE), (protocol.format, PLACE)):
        response = await protocol.send(api, **fields, stream=stream)
        assert (response.status_code, response.headers["x-headway-not-enforced"]) == (200, place), response.text
        assert stream or response.json()["warnings"] == [f"not enforced: {place}"]
    plain = await protocol.send(api, stream=stream)
    assert not {"x-headway-not-enforced", "x-headway-ignored"} & plain.headers.keys()


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_without_effect_are_named_as_they_were_sent(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, protocol: Protocol, stream: bool
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=4096)})
    response = await protocol.send(api, nonsense=1, tools=[protocol.tool | {"colour": "red"}], stream=stream)
    assert response.headers["x-headway-ignored"] == "nonsense, tools.0.colour"
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_refusals_have_the_rate_limits_of_their_band(
    make_api: MakeApi, protocol: Protocol, stream: bool
) -> None:
    dispatcher = {"headrooms": {**dict.fromkeys(Band, Headroom(5, 5, 100, 40, wait_s=None)), Band.STANDARD: HEADROOM}}
    assert rate_limits(await protocol.send(make_api(dispatcher=dispatcher), stream=stream)) == STANDARD
    full = make_api(dispatcher=dispatcher, fail_at=0, error=Overloaded("full", retry_after_s=2.5))
    refused = await protocol.send(full, stream=stream)
    assert kind_of(refused) == (429, "rate_limit_error")
    assert (rate_limits(refused), refused.headers["retry-after"]) == (STANDARD, "3")
    urgent = await protocol.send(make_api(dispatcher=dispatcher), headers={"x-headway-priority": "interactive"})
    assert rate_limits(urgent)["x-ratelimit-limit-requests"] == "5"


async def test_a_key_out_of_requests_is_refused_with_its_limit(
    make_api: MakeApi, protocol: Protocol, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({digest_of("secret"): {"tenant": "acme", "requests_per_minute": 1}}))
    api = make_api(settings={"api_key_file": str(path)})
    key = {"authorization": "Bearer secret"}
    first, second = [await protocol.send(api, headers=key, stream=True) for _ in range(2)]
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert kind_of(second)[0] == 429 and 1 <= int(second.headers["retry-after"]) <= 60
    assert "requests_per_minute, 1" in second.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_tree_of_spans_below_the_callers(
    make_api: MakeApi, protocol: Protocol, stream: bool
) -> None:
    with otlp_receiver() as receiver:
        tracer = Tracer(TracingSettings(receiver.url, trace_sampling_ratio=0.0), "headway-ingress", "a")
        api = make_api(tracer=tracer, cached_tokens=3)
        response = await protocol.send(api, headers=SAMPLED, stream=stream, temperature=0.5)
        unsampled = await protocol.send(api, stream=stream)
        await asyncio.to_thread(tracer.close)
    assert (response.status_code, unsampled.status_code) == (200, 200)
    [root] = [span for span in receiver.spans if span.parent_id == PARENT_ID]
    assert (root.name, root.attributes["http.route"]) == (f"POST {protocol.path}", protocol.path)
    assert {span.trace_id for span in receiver.spans} == {TRACE_ID}
    [chat] = receiver.named(f"chat {MODEL}")
    request = api.replica.started[0]
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.id": request.request_id.rpartition("-")[0],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }
    assert {name: chat.attributes.get(name) for name in attributes} == attributes
    assert [span.name for span in receiver.below(chat)][-1] == "placement"
    assert "secret" not in json.dumps([span.attributes for span in receiver.spans])
