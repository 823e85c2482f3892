"""The `openai` package for Python: chat, stream, `.parse()`, the `.stream()` helper, tools."""

import json
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, WEATHER, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    city: str


TOOLS: Any = [pydantic_function_tool(GetWeather, name="get_weather", description="Return the weather in a city.")]


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def text() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=[user(GREETING["question"])], temperature=0)
    check_greeting(reply.choices[0].message.content)


def stream() -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=[user(GREETING["question"])], stream=True, stream_options={"include_usage": True}
    )
    parts = list(chunks)
    check_greeting("".join(choice.delta.content or "" for part in parts for choice in part.choices))
    assert parts[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=[user(GREETING["question"])]) as events:
        assert [event for event in events if event.type == "content.delta"]
        check_greeting(events.get_final_completion().choices[0].message.content)


def structured() -> None:
    messages = [user(PERSON["question"])]
    reply = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    check_person(reply.choices[0].message.parsed)
    with client.chat.completions.stream(model=MODEL, messages=messages, response_format=Person) as events:
        check_person(events.get_final_completion().choices[0].message.parsed)


def tools() -> None:
    for is_streamed in (False, True):
        for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
            messages: list[Any] = [user(WEATHER["question"])]
            message = answer(messages, is_streamed, tool_choice=choice)
            [call] = message.tool_calls
            result = weather(**json.loads(call.function.arguments))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
            check_weather(answer(messages, is_streamed).content)


def answer(messages: list[Any], is_streamed: bool, **fields: Any) -> Any:
    arguments = {"model": MODEL, "messages": messages, "tools": TOOLS, "parallel_tool_calls": False, **fields}
    if not is_streamed:
        return client.chat.completions.create(**arguments).choices[0].message
    with client.chat.completions.stream(**arguments) as events:
        return events.get_final_completion().choices[0].message


run(("openai",), {"text": text, "stream": stream, "structured": structured, "tools": tools})
