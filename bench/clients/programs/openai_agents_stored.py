"""The OpenAI Agents SDK with what the server stores: chains of responses, conversations and a session of one."""

from typing import Any

from agents import (
    Agent,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)


def agent(**fields: Any) -> Agent:
    return Agent(name="A", instructions="Be brief.", model=OpenAIResponsesModel(MODEL, client()), **fields)


async def conversation_id() -> str:
    return str((await client().conversations.create()).id)


async def text() -> None:
    first = await Runner.run(agent(), GREETING["question"], auto_previous_response_id=True)
    second = await Runner.run(agent(), GREETING["question"], previous_response_id=first.last_response_id)
    check_greeting(second.final_output)
    stored = await client().responses.retrieve(second.last_response_id)
    assert stored.previous_response_id == first.last_response_id


async def stream() -> None:
    result = Runner.run_streamed(agent(), GREETING["question"], conversation_id=await conversation_id())
    parts = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    check_greeting("".join(parts))


async def structured() -> None:
    session = OpenAIConversationsSession(openai_client=client())
    check_greeting((await Runner.run(agent(), GREETING["question"], session=session)).final_output)
    check_person((await Runner.run(agent(output_type=Person), PERSON["question"], session=session)).final_output)
    assert len(await session.get_items()) == 4
    await session.clear_session()


async def tools() -> None:
    conversation = await conversation_id()
    assistant = agent(tools=[function_tool(get_weather)])
    check_weather((await Runner.run(assistant, WEATHER["question"], conversation_id=conversation)).final_output)
    kinds = [item.type async for item in client().conversations.items.list(conversation, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"], kinds


run(("openai-agents", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
