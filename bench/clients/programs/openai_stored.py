"""The `openai` package for Python with stored responses: background, resumed streams, chains, conversations."""

import json
import time
from typing import Any

from openai import OpenAI
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, WEATHER, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]


class Person(BaseModel):
    name: str
    age: int


def made(**fields: Any) -> Any:
    """Return a response that was made in the background."""
    reply = client.responses.create(model=MODEL, background=True, **fields)
    while reply.status in ("queued", "in_progress"):
        time.sleep(0.1)
        reply = client.responses.retrieve(reply.id)
    return reply


def text() -> None:
    reply = made(input=GREETING["question"])
    check_greeting(reply.output_text)
    assert client.responses.cancel(reply.id).status == "completed"
    assert [item.role for item in client.responses.input_items.list(reply.id)] == ["user"]
    compacted = client.responses.compact(model=MODEL, input=GREETING["question"], previous_response_id=reply.id)
    items: Any = [item.model_dump(exclude_none=True) for item in compacted.output]
    assert [item["type"] for item in items][-1] == "compaction"
    again = client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": GREETING["question"]}])
    check_greeting(again.output_text)
    client.responses.delete(reply.id)


def stream() -> None:
    events: list[Any] = []
    with client.responses.create(model=MODEL, input=GREETING["question"], background=True, stream=True) as first:
        for event in first:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
    last = events[-1].sequence_number
    events += client.responses.retrieve(events[0].response.id, stream=True, starting_after=last)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_greeting("".join(event.delta for event in events if event.type == "response.output_text.delta"))
    check_greeting(events[-1].response.output_text)


def structured() -> None:
    form = {"type": "json_schema", "name": "person", "schema": Person.model_json_schema(), "strict": True}
    form["schema"]["additionalProperties"] = False
    check_person(Person.model_validate_json(made(input=PERSON["question"], text={"format": form}).output_text))


def tools() -> None:
    question = WEATHER["question"]
    asked = made(input=question, tools=TOOLS)
    check_weather(made(input=outputs_of(asked), tools=TOOLS, previous_response_id=asked.id).output_text)
    conversation = client.conversations.create().id
    asked = client.responses.create(model=MODEL, input=question, tools=TOOLS, conversation=conversation)
    answer = client.responses.create(model=MODEL, input=outputs_of(asked), tools=TOOLS, conversation=conversation)
    check_weather(answer.output_text)
    kinds = [item.type for item in client.conversations.items.list(conversation, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"], kinds


def outputs_of(reply: Any) -> Any:
    """Return the results of a response's calls."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": weather(**json.loads(item.arguments))}
        for item in reply.output
        if item.type == "function_call"
    ]


run(("openai",), {"text": text, "stream": stream, "structured": structured, "tools": tools})
