"""litellm with a server of Anthropic's API."""

import json
from typing import Any

import litellm
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, WEATHER, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": PARAMETERS}}]


class Person(BaseModel):
    name: str
    age: int


def complete(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"anthropic/{MODEL}",
        base_url=BASE_URL.removesuffix("/v1"),
        api_key=API_KEY,
        max_tokens=400,
        messages=messages,
        num_retries=0,
        **fields,
    )


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def text() -> None:
    check_greeting(complete([user(GREETING["question"])]).choices[0].message.content)


def stream() -> None:
    chunks = complete([user(GREETING["question"])], stream=True)
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


run(("litellm",), {"text": text, "stream": stream, "structured": structured, "tools": tools})
