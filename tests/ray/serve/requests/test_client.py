"""The stock client against the served application."""

import openai
from openai.types.chat import ChatCompletionMessageParam

from tests.ray.conftest import MODEL_NAME

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the quick brown fox"}]


def chat(client: openai.OpenAI, **options):
    defaults = {"max_tokens": 12, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    return client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **{**defaults, **options})


def test_a_chat_is_answered_with_usage(client):
    reply = chat(client)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_a_stream_says_what_the_whole_reply_says(client):
    whole = chat(client, max_tokens=40).choices[0].message.content
    chunks = list(chat(client, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert sum(len(chunk.choices) for chunk in chunks) >= 3
    assert chunks[-1].usage.completion_tokens == 40


def test_a_seed_gives_the_same_text_on_any_replica(client):
    texts = {chat(client, temperature=1.0, seed=11).choices[0].message.content for _ in range(6)}
    assert len(texts) == 1


def test_the_clients_request_id_is_returned_once(client):
    reply = client.completions.with_raw_response.create(
        model=MODEL_NAME, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert reply.headers.get_list("x-request-id") == ["mine-1"]
