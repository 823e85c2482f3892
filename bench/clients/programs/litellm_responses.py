"""litellm's `responses` with an OpenAI-compatible server."""

import json
from typing import Any

import litellm
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, WEATHER, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "get_weather", "description": "", "parameters": PARAMETERS}]


class Person(BaseModel):
    name: str
    age: int


def respond(items: Any, **fields: Any) -> Any:
    return litellm.responses(model=f"openai/{MODEL}", api_base=BASE_URL, api_key=API_KEY, input=items, **fields)


def text() -> None:
    check_greeting(respond(GREETING["question"]).output_text)


def stream() -> None:
    events = list(respond(GREETING["question"], stream=True))
    check_greeting("".join(event.delta for event in events if event.type == "response.output_text.delta"))
    assert events[-1].response.usage.output_tokens > 0


def structured() -> None:
    reply = respond(PERSON["question"], text_format=Person)
    check_person(Person.model_validate_json(reply.output_text))


def tools() -> None:
    for is_streamed in (False, True):
        items: list[Any] = [{"role": "user", "content": WEATHER["question"]}]
        reply = answer(items, is_streamed)
        [call] = [item for item in map(_fields, reply.output) if item["type"] == "function_call"]
        result = weather(**json.loads(call["arguments"]))
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        check_weather(answer([*items, *map(_fields, reply.output), output], is_streamed).output_text)


def _fields(item: Any) -> Any:
    return item if isinstance(item, dict) else item.model_dump(exclude_none=True)


def answer(items: list[Any], is_streamed: bool) -> Any:
    reply = respond(items, tools=TOOLS, stream=is_streamed)
    return list(reply)[-1].response if is_streamed else reply


run(("litellm", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
