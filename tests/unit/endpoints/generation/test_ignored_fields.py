"""Fields of other vendors' clients that change nothing: the request is served, and the answer names them."""

from typing import Any

import pytest

from serve_app.openai.request.validation import RequestLimits
from testkit.http.api import MODEL, Api, MakeApi, refusal

HEADER = "x-headway-ignored"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "hello", "cache_control": {"type": "ephemeral"}, "id": "msg_1"},
    {"role": "assistant", "content": "yes", "reasoning_details": [{"type": "reasoning.text", "text": "t"}]},
    {"role": "user", "content": "go", "extra_content": {"google": {}}},
]
NAMED = (
    "messages.0.content.0.cache_control, messages.1.cache_control, messages.1.id, messages.2.reasoning_details, "
    "messages.3.extra_content, verbosity, max_token"
)
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "verbosity": "low", "max_token": 2}


def without_ignored() -> list[dict[str, Any]]:
    return [
        {"role": message["role"], "content": "be brief" if number == 0 else message["content"]}
        for number, message in enumerate(MESSAGES)
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_chat_is_served_as_without_them(api: Api, is_streamed: bool) -> None:
    response = await api.post("/v1/chat/completions", CHAT | {"max_tokens": 3, "stream": is_streamed})
    assert (response.status_code, response.headers[HEADER]) == (200, NAMED)
    plain = await api.chat(messages=without_ignored(), max_tokens=3)
    assert plain.status_code == 200 and HEADER not in plain.headers
    first, second = (request.prompt_token_ids for request in api.replica.started)
    assert first == second


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, "colour": "red"}, "colour"),
        ("/tokenize", {"messages": MESSAGES[1:2], "nonsense": 1},
         "messages.0.cache_control, messages.0.id, nonsense"),
        ("/detokenize", {"tokens": [1], "nonsense": 1}, "nonsense"),
        ("/v1/jobs", CHAT | {"callback": "x"}, f"{NAMED}, callback"),
        ("/generate", {"prompt": "a", "colour": "red"}, "colour"),
        ("/v1/batch/sync", {"prompts": ["a"], "max_tokens": 1, "colour": "red"}, "colour"),
        ("/v1/batch/async", {"prompts": ["a"], "colour": "red"}, "colour"),
    ],
)  # fmt: skip
async def test_every_route_with_a_body_names_them(
    make_api: MakeApi, path: str, body: dict[str, Any], named: str
) -> None:
    response = await make_api().post(path, body)
    assert response.status_code in (200, 202) and response.headers[HEADER] == named
    strict = make_api(settings={"limits": RequestLimits(unknown_fields="refuse")})
    status, code, param = refusal(await strict.post(path, body))
    assert (status, code) == (400, "unsupported_parameter")
    assert param in ("verbosity", "colour", "nonsense")


async def test_a_batch_takes_them_too(api: Api) -> None:
    file = await api.openai.files.create(file=("in.jsonl", b'{"custom_id": "a"}'), purpose="batch")
    fields = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", "colour": "red"}
    response = await api.post("/v1/batches", fields)
    assert (response.status_code, response.headers[HEADER]) == (200, "colour")
    assert refusal(await api.post("/v1/batches", fields | {"priority": 0})) == (
        400,
        "unsupported_parameter",
        "priority",
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([MESSAGES[1] | {"content": [MESSAGES[0]["content"][0] | {"type": "image_url"}]}], "messages[0].content"),
        ([MESSAGES[1] | {"audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "user", "content": "a"}, MESSAGES[1] | {"images": ["x"]}], "messages[1].images"),
        ([{"role": "user", "content": "a"}, MESSAGES[2] | {"prefix": True}], "messages[1].prefix"),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_its_place(
    api: Api, messages: list[dict[str, Any]], param: str
) -> None:
    assert refusal(await api.chat(messages=messages)) == (400, "unsupported_parameter", param)


async def test_refused_fields_of_messages_are_named_by_their_place(make_api: MakeApi) -> None:
    api = make_api(settings={"limits": RequestLimits(unknown_fields="refuse")})
    expected = {1: "messages[0].cache_control", 2: "messages[0].reasoning_details", 3: "messages[0].extra_content"}
    for number, param in expected.items():
        response = await api.chat(messages=[MESSAGES[number]])
        assert refusal(response) == (400, "unsupported_parameter", param)
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {}}
    assert refusal(await api.chat(tools=[tool])) == (400, "unsupported_parameter", "tools[0].cache_control")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/jobs"])
async def test_a_byte_order_mark_before_a_body_is_ignored(api: Api, path: str) -> None:
    body = b'\xef\xbb\xbf{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}'
    for content in (body, b"\xef\xbb\xbf \r\n" + body[3:]):
        response = await api.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 202), response.text
    twice = await api.http.post(path, content=body[:3] + body, headers={"content-type": "application/json"})
    assert twice.status_code == 400 and "not valid JSON" in twice.text
