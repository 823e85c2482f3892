"""Sizes of bodies, which are bounded before the bodies are read."""

import json
import random
from typing import Any

import pytest

from serve_app.openai.request.sizes import JsonSize
from serve_app.openai.request.validation import RequestLimits
from testkit.http.api import MODEL, Api, MakeApi, refusal

TEXT = 'a,b:[c]{d}"e\\f\\"'


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth < 5 and kind < 0.3:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    if depth < 5 and kind < 0.6:
        return {f"{TEXT[: rng.randrange(17)]}{i}": random_value(rng, depth + 1) for i in range(rng.randrange(6))}
    return rng.choice([None, True, rng.random(), rng.randrange(10**6), "".join(rng.choices(TEXT, k=rng.randrange(30)))])


def size_of(value: Any) -> JsonSize:
    """Return the size of a value, counted in the plain way."""
    if not isinstance(value, dict | list):
        return JsonSize(0, 0)
    parts = [size_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    num_names = len(value) if isinstance(value, dict) else 0
    return JsonSize(
        max(1, len(value)) + sum(part.num_values for part in parts),
        1 + num_names + sum(part.num_objects for part in parts),
    )


@pytest.mark.parametrize("seed", range(10))
def test_values_are_counted_outside_of_strings(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        value = random_value(rng)
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        assert JsonSize.of(data) == size_of(value)
        assert JsonSize.at_most(data).num_values >= size_of(value).num_values


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("text", ["\\" * 7 + '"', "\\\\" * 40_000])
def test_strings_may_cross_the_slices_of_the_counting(shift: int, text: str) -> None:
    value = ["x" * shift, *[text] * (5 * 2**18 // len(json.dumps(text)))]
    assert JsonSize.of(json.dumps(value, separators=(",", ":")).encode()) == size_of(value)


@pytest.mark.parametrize("count", [JsonSize.of, JsonSize.at_most])
def test_the_counting_ends_soon_after_a_limit(count: Any) -> None:
    limits = RequestLimits()
    size = count(b"[" + b"1," * 10**6 + b"1]", limits)
    assert limits.max_body_values < size.num_values < 2 * limits.max_body_values


MANY_TEXTS = b",".join([b'"a"'] * 1_500_000)
MANY_MESSAGES = b",".join([b'{"role":"user","content":""}'] * 190_000)


@pytest.mark.parametrize(
    ("path", "content", "param", "words"),
    [
        ("/v1/completions", b'{"model":"tiny","prompt":[' + MANY_TEXTS + b"]}", None, "at most 131072 are accepted"),
        ("/tokenize", b'{"messages":[' + MANY_MESSAGES[: 29 * 100_000 - 1] + b"]}", None, "at most 32768 are accepted"),
        (
            "/v1/chat/completions",
            b'{"model":"tiny","messages":[' + MANY_MESSAGES[: 29 * 2049 - 1] + b"]}",
            "messages",
            "`messages` has 2049 messages; at most 2048 are accepted",
        ),
        (
            "/v1/completions",
            b'{"model":"tiny","prompt":[' + MANY_TEXTS[: 4 * 10_000 - 1] + b"]}",
            "prompt",
            "`prompt` has 10000 prompts; at most 128 are accepted",
        ),
    ],
    ids=["values", "objects", "messages", "prompts"],
)
async def test_a_body_of_too_many_parts_is_refused_unread(
    api: Api, path: str, content: bytes, param: str | None, words: str
) -> None:
    response = await api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert refusal(response) == (400, "invalid_value", param)
    assert words in response.json()["error"]["message"]


async def test_punctuation_in_a_text_counts_for_nothing(make_api: MakeApi) -> None:
    api = make_api(settings={"limits": RequestLimits(max_body_values=80)})
    assert (await api.chat(messages=[{"role": "user", "content": '",[{:' * 20}])).status_code == 200


async def test_echo_with_many_log_probabilities_is_refused(make_api: MakeApi) -> None:
    api = make_api(settings={"limits": RequestLimits(max_echo_logprobs=100)})
    prompts = [[1] * 20] * 5
    assert (await api.complete(prompt=prompts, echo=True, logprobs=0, max_tokens=1)).status_code == 200
    response = await api.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    assert refusal(response) == (400, "invalid_value", "logprobs")
    assert "are 200 log probabilities; at most 100 are accepted" in response.json()["error"]["message"]
    response = await api.complete(prompt=prompts, n=2, prompt_logprobs=0, max_tokens=1)
    assert refusal(response) == (400, "invalid_value", "prompt_logprobs")
    assert (await api.complete(prompt=prompts, logprobs=1, max_tokens=1)).status_code == 200
    assert (await api.chat(prompt_logprobs=20)).status_code == 400


async def test_a_hopeless_conversation_is_not_rendered(api: Api) -> None:
    messages = [{"role": "assistant", "content": "the template refuses it"}, {"role": "user", "content": "a" * 50_000}]
    response = await api.chat(messages=messages)
    assert refusal(response) == (400, "context_length_exceeded", "messages")
    short = [messages[0], {"role": "user", "content": " " * 50_000 + "a"}]
    assert "the user speaks first" in (await api.chat(messages=short)).json()["error"]["message"]


async def test_large_replies_with_log_probabilities_are_those_of_small_ones(make_api: MakeApi, tokenizer: Any) -> None:
    api = make_api()
    body = {"prompt": [[1] * 100] * 8, "echo": True, "logprobs": 5, "max_tokens": 3, "temperature": 0}
    whole = (await api.complete(**body)).json()
    alone = (await api.complete(**body | {"prompt": [[1] * 100]})).json()
    assert [choice["logprobs"] for choice in whole["choices"]] == [alone["choices"][0]["logprobs"]] * 8
    assert whole["model"] == MODEL
