"""AutoGen: an assistant with text, a stream, a content type, and a tool whose result it reflects on."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
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


class Person(BaseModel):
    name: str
    age: int


def assistant(**fields: Any) -> AssistantAgent:
    info = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    }  # fmt: skip
    client = OpenAIChatCompletionClient(model=MODEL, base_url=BASE_URL, api_key=API_KEY, model_info=info, max_retries=0)
    return AssistantAgent("assistant", model_client=client, **fields)


async def answer(question: str, **fields: Any) -> Any:
    return (await assistant(**fields).run(task=question)).messages[-1].content


async def text() -> None:
    check_greeting(await answer(GREETING["question"]))


async def stream() -> None:
    agent = assistant(model_client_stream=True)
    events = [event async for event in agent.run_stream(task=GREETING["question"])]
    check_greeting("".join(event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)))
    assert isinstance(events[-1], TaskResult)
    check_greeting(events[-1].messages[-1].content)


async def structured() -> None:
    check_person(await answer(PERSON["question"], output_content_type=Person))


async def tools() -> None:
    for is_streamed in (False, True):
        fields = {"tools": [get_weather], "reflect_on_tool_use": True, "model_client_stream": is_streamed}
        check_weather(await answer(WEATHER["question"], **fields))


run(
    ("autogen-agentchat", "autogen-ext", "openai"),
    {"text": text, "stream": stream, "structured": structured, "tools": tools},
)
