"""smolagents: its model for OpenAI's API, and the agent that calls tools."""

import json

from pydantic import BaseModel
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool
from ways import API_KEY, BASE_URL, CALLED, GREETING, MODEL, PERSON, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

model = OpenAIServerModel(model_id=MODEL, api_base=BASE_URL, api_key=API_KEY, client_kwargs={"max_retries": 0})


class Person(BaseModel):
    name: str
    age: int


def user(question: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=[{"type": "text", "text": question}])]


def text() -> None:
    check_greeting(model.generate(user(GREETING["question"])).content)


def stream() -> None:
    check_greeting("".join(part.content or "" for part in model.generate_stream(user(GREETING["question"]))))


def structured() -> None:
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    answer = model.generate(user(PERSON["question"]), response_format={"type": "json_schema", "json_schema": schema})
    check_person(json.loads(answer.content))


def tools() -> None:
    for is_streamed in (False, True):
        agent = ToolCallingAgent(
            tools=[tool(weather)], model=model, max_steps=3, verbosity_level=0, stream_outputs=is_streamed
        )
        check_weather(agent.run(CALLED["question"]), CALLED)


run(("smolagents", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
