"""CrewAI: its model for OpenAI's API, and an agent with a tool."""

from typing import Any

from crewai import LLM, Agent
from crewai.tools import tool
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


def llm(**fields: Any) -> LLM:
    return LLM(model=MODEL, provider="openai", base_url=BASE_URL, api_key=API_KEY, max_retries=0, **fields)


def text() -> None:
    check_greeting(llm().call(GREETING["question"]))


def stream() -> None:
    check_greeting(llm(stream=True).call(GREETING["question"]))


def structured() -> None:
    answer = llm().call(PERSON["question"], response_model=Person)
    check_person(Person.model_validate_json(answer) if isinstance(answer, str) else answer)


def tools() -> None:
    agent = Agent(
        role="Reporter", goal="Answer", backstory="Short", llm=llm(), tools=[tool("get_weather")(get_weather)]
    )
    check_weather(agent.kickoff(WEATHER["question"]).raw)


run(("crewai", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
