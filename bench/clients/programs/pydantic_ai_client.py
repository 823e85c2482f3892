"""pydantic-ai: agents with text, native and tool output, and tools."""

from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
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


class Person(BaseModel):
    name: str
    age: int


def agent(**fields: Any) -> Agent:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
    return Agent(model, retries=0, **fields)


async def text() -> None:
    check_greeting((await agent().run(GREETING["question"])).output)


async def stream() -> None:
    async with agent().run_stream(GREETING["question"]) as result:
        check_greeting("".join([part async for part in result.stream_text(delta=True)]))


async def structured() -> None:
    check_person((await agent(output_type=NativeOutput(Person)).run(PERSON["question"])).output)
    check_person((await agent(output_type=Person).run(PERSON["question"])).output)
    async with agent(output_type=Person).run_stream(PERSON["question"]) as result:
        check_person(await result.get_output())


async def tools() -> None:
    check_weather((await agent(tools=[get_weather]).run(WEATHER["question"])).output)
    async with agent(tools=[get_weather]).run_stream(WEATHER["question"]) as result:
        check_weather(await result.get_output())


run(("pydantic-ai-slim", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
