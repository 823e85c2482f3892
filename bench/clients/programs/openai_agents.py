"""The OpenAI Agents SDK with a chat model."""

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from ways import (
    API_KEY,
    BASE_URL,
    GREETING,
    MODEL,
    PERSON,
    WEATHER,
    check_greeting,
    check_person,
    check_weather,
    get_weather,
    run,
)

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


def agent(**fields: Any) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    return Agent(name="A", instructions="Be brief.", model=OpenAIChatCompletionsModel(MODEL, client), **fields)


async def text() -> None:
    check_greeting((await Runner.run(agent(), GREETING["question"])).final_output)


async def stream() -> None:
    result = Runner.run_streamed(agent(), GREETING["question"])
    parts = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    check_greeting("".join(parts))


async def structured() -> None:
    check_person((await Runner.run(agent(output_type=Person), PERSON["question"])).final_output)


async def tools() -> None:
    weather = function_tool(get_weather)
    check_weather((await Runner.run(agent(tools=[weather]), WEATHER["question"])).final_output)
    result = Runner.run_streamed(agent(tools=[weather]), WEATHER["question"])
    async for _ in result.stream_events():
        pass
    check_weather(result.final_output)


run(("openai-agents", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
