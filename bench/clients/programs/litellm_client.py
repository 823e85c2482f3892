"""litellm with an OpenAI-compatible server, or as `litellm_client.py anthropic` with one of Anthropic's API."""

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel
from ways import (
    API_KEY,
    BASE_URL,
    GREETING,
    MODEL,
    PERSON,
    ROOT_URL,
    WEATHER,
    check_greeting,
    check_person,
    check_weather,
    run,
)
from ways import get_weather as weather

IS_ANTHROPIC = sys.argv[1:] == ["anthropic"]
SERVER = {"model": f"openai/{MODEL}", "base_url": BASE_URL}
if IS_ANTHROPIC:
    SERVER = {"model": f"anthropic/{MODEL}", "base_url": ROOT_URL, "max_tokens": 400}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": PARAMETERS}}]


class Person(BaseModel):
    name: str
    age: int


def complete(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(**SERVER, api_key=API_KEY, messages=messages, num_retries=0, **fields)


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def text() -> None:
    check_greeting(complete([user(GREETING["question"])]).choices[0].message.content)


def stream() -> None:
    usage = {} if IS_ANTHROPIC else {"stream_options": {"include_usage": True}}
    chunks = complete([user(GREETING["question"])], stream=True, **usage)
    check_greeting("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def structured() -> None:
    reply = complete([user(PERSON["question"])], response_format=Person)
    check_person(Person.model_validate_json(reply.choices[0].message.content))
    reply = complete([user(PERSON["question"])], response_format={"type": "json_object"})
    check_person(Person.model_validate_json(reply.choices[0].message.content))


def tools() -> None:
    for is_streamed in (False, True):
        messages: list[Any] = [user(WEATHER["question"])]
        message = answer(messages, is_streamed, tool_choice="auto", parallel_tool_calls=True)
        [call] = message.tool_calls
        result = weather(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result}]
        check_weather(answer(messages, is_streamed).content)


def answer(messages: list[Any], is_streamed: bool, **fields: Any) -> Any:
    reply = complete(messages, tools=TOOLS, stream=is_streamed, **fields)
    return (litellm.stream_chunk_builder(list(reply)) if is_streamed else reply).choices[0].message


run(
    ("litellm",) if IS_ANTHROPIC else ("litellm", "openai"),
    {"text": text, "stream": stream, "structured": structured, "tools": tools},
)
