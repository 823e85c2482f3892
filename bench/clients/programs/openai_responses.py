"""The `openai` package for Python with its Responses API: create, stream, `.parse()`, tools, counts."""

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


FUNCTION: Any = pydantic_function_tool(GetWeather, name="get_weather")["function"]
TOOLS: Any = [{"type": "function", **FUNCTION}]


def text() -> None:
    reply = client.responses.create(model=MODEL, input=GREETING["question"], temperature=0)
    check_greeting(reply.output_text)
    count = client.responses.input_tokens.count(model=MODEL, input=GREETING["question"])
    assert count.input_tokens == reply.usage.input_tokens


def stream() -> None:
    events = list(client.responses.create(model=MODEL, input=GREETING["question"], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_greeting("".join(event.delta for event in events if event.type == "response.output_text.delta"))
    with client.responses.stream(model=MODEL, input=GREETING["question"]) as helper:
        check_greeting(helper.get_final_response().output_text)


def structured() -> None:
    check_person(client.responses.parse(model=MODEL, input=PERSON["question"], text_format=Person).output_parsed)
    with client.responses.stream(model=MODEL, input=PERSON["question"], text_format=Person) as helper:
        check_person(helper.get_final_response().output_parsed)


def tools() -> None:
    for is_streamed in (False, True):
        for choice in ("auto", "required", {"type": "function", "name": "get_weather"}):
            items: list[Any] = [{"role": "user", "content": WEATHER["question"]}]
            reply = answer(items, is_streamed, tool_choice=choice)
            [call] = [item for item in reply.output if item.type == "function_call"]
            result = weather(**json.loads(call.arguments))
            items += [*reply.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
            check_weather(answer(items, is_streamed).output_text)


def answer(items: list[Any], is_streamed: bool, **fields: Any) -> Any:
    arguments = {"model": MODEL, "input": items, "tools": TOOLS, "parallel_tool_calls": False, **fields}
    if not is_streamed:
        return client.responses.create(**arguments)
    with client.responses.stream(**arguments) as events:
        return events.get_final_response()


run(("openai",), {"text": text, "stream": stream, "structured": structured, "tools": tools})
