"""Haystack: the chat generator, whole and streamed, its response format, and an agent."""

from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
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


def generator(**fields: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(API_KEY), model=MODEL, api_base_url=BASE_URL, max_retries=0, **fields
    )


def ask(question: str, **fields: Any) -> str:
    return str(generator(**fields).run([ChatMessage.from_user(question)])["replies"][0].text)


def text() -> None:
    check_greeting(ask(GREETING["question"]))


def stream() -> None:
    parts: list[str] = []
    check_greeting(ask(GREETING["question"], streaming_callback=lambda chunk: parts.append(chunk.content)))
    check_greeting("".join(parts))


def structured() -> None:
    answer = ask(PERSON["question"], generation_kwargs={"response_format": Person})
    check_person(Person.model_validate_json(answer))


def tools() -> None:
    tool = create_tool_from_function(get_weather)
    for callback in (None, lambda chunk: None):
        agent = Agent(chat_generator=generator(), tools=[tool], streaming_callback=callback)
        result = agent.run(messages=[ChatMessage.from_user(WEATHER["question"])])
        check_weather(result["messages"][-1].text)


run(("haystack-ai", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
