"""The `anthropic` package for Python: messages, batches, streams, `.parse()`, tools, their runner, counts, models."""

import time
from typing import Any

from anthropic import Anthropic, ConflictError, NotFoundError, beta_tool
from pydantic import BaseModel
from ways import API_KEY, GREETING, MODEL, PERSON, ROOT_URL, WEATHER, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

client = Anthropic(base_url=ROOT_URL, api_key=API_KEY, max_retries=0)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "get_weather", "description": "Return the weather in a city.", "input_schema": PARAMETERS}]


class Person(BaseModel):
    name: str
    age: int


def fields(question: str) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8_000, "messages": [{"role": "user", "content": question}]}


def text() -> None:
    reply = client.messages.create(**fields(GREETING["question"]))
    check_greeting(reply.content[0].text)
    assert [model.id for model in client.models.list()] == [MODEL]
    given = None
    try:
        client.messages.create(**fields("hi") | {"model": "nobody"})
    except NotFoundError as error:
        given = error.request_id
    assert given, "an error has no request id"
    batch()


def batch() -> None:
    """Check the calls of message batches."""
    batches = client.messages.batches
    made = batches.create(requests=[{"custom_id": "one", "params": fields(GREETING["question"])}])
    while made.processing_status != "ended":
        time.sleep(0.2)
        made = batches.retrieve(made.id)
    [line] = batches.results(made.id)
    check_greeting(line.result.message.content[0].text)
    assert made.id in [each.id for each in batches.list(limit=5).data]
    try:
        batches.cancel(made.id)
    except ConflictError:
        assert batches.delete(made.id).id == made.id
    else:
        raise AssertionError("a batch that has ended was cancelled")


def stream() -> None:
    events = list(client.messages.create(**fields(GREETING["question"]), stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    with client.messages.stream(**fields(GREETING["question"])) as parts:
        check_greeting("".join(parts.text_stream))
        assert parts.get_final_message().usage.output_tokens > 0


def structured() -> None:
    check_person(client.messages.parse(**fields(PERSON["question"]), output_format=Person).parsed_output)


def tools() -> None:
    for is_streamed in (False, True):
        for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
            messages = fields(WEATHER["question"])["messages"]
            message = answer(messages, is_streamed, tool_choice=choice)
            [call] = message.content
            result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
            check_weather(answer(messages, is_streamed).content[0].text)
            count = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS)
            assert count.input_tokens > message.usage.input_tokens + message.usage.cache_read_input_tokens
    runner = client.beta.messages.tool_runner(**fields(WEATHER["question"]), tools=[beta_tool(weather)])
    check_weather(runner.until_done().content[0].text)


def answer(messages: list[Any], is_streamed: bool, **options: Any) -> Any:
    arguments = {"model": MODEL, "max_tokens": 400, "messages": messages, "tools": TOOLS, **options}
    if not is_streamed:
        return client.messages.create(**arguments)
    with client.messages.stream(**arguments) as events:
        return events.get_final_message()


run(("anthropic",), {"text": text, "stream": stream, "structured": structured, "tools": tools})
