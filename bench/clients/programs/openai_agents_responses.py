"""The OpenAI Agents SDK with its default model, the Responses API: tools, handoffs and sessions."""

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from ways import (
    API_KEY,
    BASE_URL,
    GREETING,
    MODEL,
    PERSON,
    SCENARIO,
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


def agent(name: str = "A", **fields: Any) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    return Agent(name=name, instructions="Be brief.", model=OpenAIResponsesModel(MODEL, client), **fields)


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
    session = SQLiteSession("session")
    check_greeting((await Runner.run(agent(), GREETING["question"], session=session)).final_output)
    check_weather((await Runner.run(agent(tools=[weather]), WEATHER["question"], session=session)).final_output)
    result = Runner.run_streamed(agent(tools=[weather]), WEATHER["question"])
    async for _ in result.stream_events():
        pass
    check_weather(result.final_output)
    handoff = SCENARIO["handoff"]
    handed_off = await Runner.run(agent(handoffs=[agent(handoff["agent"])]), handoff["question"])
    assert handed_off.last_agent.name == handoff["agent"], f"the agent is {handed_off.last_agent.name}"
    assert handed_off.final_output == handoff["answer"], f"the answer is {handed_off.final_output}"


run(("openai-agents", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
