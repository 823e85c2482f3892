"""Refused requests; the refusal names the field."""

from typing import Any

import pytest

from serve_app.openai.request.validation import RequestLimits
from testkit.http.api import MODEL, Api, MakeApi, card_of, refusal

pytestmark = pytest.mark.rotated

UNSUPPORTED, TOO_LONG = "unsupported_parameter", "context_length_exceeded"


def error_of(response: Any) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", "5"),
        ("n", 2.0),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", -1),
        ("max_tokens", 5.0),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop_token_ids", [320]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["3"]),
        ("logit_bias", {"320": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"5\n": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", []),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", 1),
        ("user", 5),
        ("priority", 3),
        ("priority", -1),
        ("priority", "high"),
        ("service_tier", "gold"),
        ("deadline_ms", 0),
        ("model", 5),
    ],
)
async def test_bad_value_is_a_400_that_names_the_field(api: Api, param: str, value: Any) -> None:
    response = await api.post("/v1/completions", {"model": MODEL, "prompt": "hi", param: value})
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_value")
    assert error["param"].partition("[")[0].partition(".")[0] == param
    assert param in error["message"]
    assert not api.replica.started


@pytest.mark.parametrize("value", [21, -1, True, 1.5])
async def test_bad_completion_logprobs(api: Api, value: Any) -> None:
    assert refusal(await api.complete(logprobs=value)) == (400, "invalid_value", "logprobs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": ["hi"]}, "messages[0]"),
    ],
)
async def test_bad_chat_field_is_named(api: Api, fields: dict[str, Any], param: str) -> None:
    status, _, named = refusal(await api.chat(**fields))
    assert (status, named) == (400, param)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", 5], [5, "a"], [[1], "a"], [True], [1.0], {"a": 1}, 5, [320], [[1], [-1]]]
)
async def test_unusable_prompt_is_named(api: Api, prompt: Any) -> None:
    assert refusal(await api.complete(prompt=prompt)) == (400, "invalid_value", "prompt")


@pytest.mark.parametrize("param", ["model", "prompt"])
async def test_missing_field_is_named(api: Api, param: str) -> None:
    fields = {"model": MODEL, "prompt": "hi"}
    del fields[param]
    for body in (fields, fields | {param: None}):
        response = await api.post("/v1/completions", body)
        assert refusal(response) == (400, "missing_required_parameter", param)


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {}},
        {"functions": [{"name": "f"}]},
        {"store": 1},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"web_search_options": {}},
        {"moderation": {"model": "m"}},
        {"use_beam_search": True},
        {"prompt": "a"},
        {"callback_url": "https://example.com"},
        {"regex": "a*"},
        {"thinking": {"type": "disabled"}},
    ],
    ids=lambda field: str(field)[:30],
)
async def test_unsupported_field_is_named(api: Api, field: dict[str, Any]) -> None:
    response, name = await api.chat(**field), next(iter(field))
    assert refusal(response) == (400, UNSUPPORTED, name)
    assert f"`{name}`" in error_of(response)["message"]


async def test_all_unsupported_fields_are_named_at_once(api: Api) -> None:
    message = error_of(await api.chat(store=1, web_search_options={}))["message"]
    assert "`store`" in message and "`web_search_options`" in message


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "function", "content": "42", "name": "x"}],
        [{"role": "assistant", "content": "hi", "function_call": {"name": "f", "arguments": "{}"}}],
    ],
)
async def test_unsupported_message_is_refused(api: Api, messages: list[Any]) -> None:
    status, code, param = refusal(await api.chat(messages=messages))
    assert (status, code) == (400, UNSUPPORTED)
    assert param is not None and param.startswith("messages[0]")


async def test_fields_that_ask_for_nothing_are_accepted(api: Api) -> None:
    response = await api.chat(
        max_tokens=2,
        response_format={"type": "text"},
        tools=None,
        tool_choice="none",
        parallel_tool_calls=True,
        functions=[],
        store=True,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        modalities=["text"],
        reasoning_effort=None,
        prediction=None,
        audio=None,
        service_tier="auto",
    )
    assert response.status_code == 200
    assert (await api.complete(suffix=None, best_of=None)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": None}},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None}},
        {"messages": [{"role": "user", "content": "hi", "name": None, "refusal": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]}]},
    ],
)
async def test_null_is_not_given_at_every_depth(api: Api, fields: dict[str, Any]) -> None:
    assert (await api.chat(max_tokens=1, **fields)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing_required_parameter"),
        ({"stream": True, "stream_options": {"nonsense": None}}, "stream_options.nonsense", UNSUPPORTED),
    ],
)
async def test_null_makes_no_field_optional_or_known(api: Api, fields: dict[str, Any], param: str, code: str) -> None:
    assert refusal(await api.chat(**fields)) == (400, code, param)


async def test_prompt_too_long_names_limit_and_value(api: Api) -> None:
    response = await api.complete(prompt=[1] * 1256)
    assert refusal(response) == (400, TOO_LONG, "prompt")
    assert error_of(response)["message"] == (
        "This model's maximum context length is 256 tokens. However, your prompt resulted in 1256 tokens. "
        "Please reduce the length of the prompt."
    )


async def test_overflow_has_the_message_of_openai(api: Api) -> None:
    num_prompt = (await api.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})).json()["count"]
    assert error_of(await api.chat(max_tokens=1_000_000))["message"] == (
        f"This model's maximum context length is 256 tokens. However, you requested {num_prompt + 1_000_000} tokens "
        f"({num_prompt} in the messages, 1000000 in the completion). "
        "Please reduce the length of the messages or completion."
    )


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": [1] * 256}, 400),  # leaves no room for a token
        ({"prompt": [1] * 255}, 200),
        ({"prompt": [1] * 256, "echo": True, "max_tokens": 0}, 200),
        ({"prompt": [1] * 200, "max_tokens": 57}, 400),
        ({"prompt": [1] * 200, "max_tokens": 56}, 200),
    ],
)
async def test_prompt_and_output_must_fit_the_context(api: Api, fields: dict[str, Any], status: int) -> None:
    response = await api.complete(**fields)
    assert response.status_code == status
    if status == 400:
        assert refusal(response) == (400, TOO_LONG, "max_tokens" if "max_tokens" in fields else "prompt")


@pytest.mark.parametrize(
    ("fields", "digits"),
    [
        ({"max_tokens": 1e16}, "10000000000000000"),
        ({"temperature": 9.5}, "9.5"),
        ({"top_p": -1e-9}, "-0.000000001"),
        ({"n": 1_000_000}, "1000000"),
        ({"presence_penalty": -1e300}, "-1000000"),
    ],
)
async def test_numbers_are_written_in_plain_digits(api: Api, fields: dict[str, Any], digits: str) -> None:
    message = error_of(await api.chat(**fields))["message"]
    assert f" {digits}" in message
    assert "e+" not in message and "e-" not in message


async def test_chat_too_long_names_messages(api: Api) -> None:
    messages = [{"role": "user", "content": "quick fox " * 200}]
    assert refusal(await api.chat(messages=messages)) == (400, TOO_LONG, "messages")


async def test_hopeless_text_is_refused_without_tokenizing(api: Api) -> None:
    response = await api.complete(prompt="a" * 5_000_000)
    assert response.status_code == 400
    assert "at least" in error_of(response)["message"]
    assert response.elapsed.total_seconds() < 1


async def test_number_of_prompts_and_choices_is_bounded(make_api: MakeApi) -> None:
    api = make_api(settings={"limits": RequestLimits(max_prompts=3, max_choices=4)})
    assert (await api.complete(prompt=["a"] * 3)).status_code == 200
    for prompts, n, param in ((4, 1, "prompt"), (1, 5, "n"), (3, 2, "n")):
        assert refusal(await api.complete(prompt=["a"] * prompts, n=n)) == (400, "invalid_value", param)


async def test_unknown_model_is_404(api: Api) -> None:
    assert refusal(await api.complete(model="other")) == (404, "model_not_found", "model")


async def test_refused_value_is_shown(api: Api) -> None:
    assert "got 3" in error_of(await api.complete(temperature=3))["message"]


LONG = "x" * 5000
HUGE = 10**4000


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": LONG},
        {"temperature": HUGE},
        {"n": HUGE},
        {"max_tokens": HUGE},
        {"min_tokens": HUGE},
        {"top_k": HUGE},
        {"seed": HUGE},
        {"logprobs": HUGE},
        {"deadline_ms": HUGE},
        {"stop_token_ids": [HUGE]},
        {"prompt": [HUGE]},
        {"logit_bias": {LONG: 1}},
        {"logit_bias": {LONG: "1"}},
        {"service_tier": LONG},
        {"model": LONG},
        {"stream": True, "stream_options": {LONG: 1}},
        {LONG: 1},
        {f"{LONG}{number}": 1 for number in range(50)},
    ],
    ids=lambda fields: str(fields)[:30],
)
async def test_long_values_are_not_repeated_whole(make_api: MakeApi, fields: dict[str, Any]) -> None:
    api = make_api(settings={"limits": RequestLimits(unknown_fields="refuse")})
    response = await api.complete(**fields)
    assert response.status_code in (400, 404)
    assert len(error_of(response)["message"]) < 700 and len(error_of(response)["param"]) < 80


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": LONG}]}],
        [{"role": LONG, "content": "a"}],
        [{"role": "user", "content": "a", LONG: 1}],
    ],
    ids=lambda messages: str(messages)[:60],
)
async def test_long_values_in_messages_are_not_repeated_whole(make_api: MakeApi, messages: list[Any]) -> None:
    api = make_api(settings={"limits": RequestLimits(unknown_fields="refuse")})
    error = error_of(await api.chat(messages=messages))
    assert len(error["message"]) < 200 and len(error["param"]) < 80


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (f"/{LONG}", {}),
        (f"/v1/{LONG}", {}),
        (f"/v1/models/{LONG}", {}),
        ("/v1/completions", {"content-type": LONG}),
        ("/v1/completions", {"x-headway-priority": LONG}),
        ("/v1/completions", {"request-timeout-ms": LONG}),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_long_paths_and_headers_are_not_repeated_whole(api: Api, path: str, headers: dict[str, str]) -> None:
    response = await api.http.post(path, content=b"{}", headers=headers)
    assert 400 <= response.status_code < 500
    assert len(error_of(response)["message"]) < 200


async def test_model_card_sets_the_bounds(make_api: MakeApi, tokenizer: Any) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=20)})
    assert (await api.complete(prompt=[1] * 20)).status_code == 400
    assert (await api.complete(prompt=[1] * 19)).json()["usage"]["completion_tokens"] == 1
