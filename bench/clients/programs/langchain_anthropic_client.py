"""langchain-anthropic: `ChatAnthropic`, `with_structured_output`, `bind_tools`, and an agent of langchain."""

from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from ways import (
    API_KEY,
    GREETING,
    MODEL,
    PERSON,
    ROOT_URL,
    WEATHER,
    check_greeting,
    check_person,
    check_weather,
    get_weather,
    run,
)

model = ChatAnthropic(model=MODEL, base_url=ROOT_URL, api_key=API_KEY, max_retries=0, max_tokens=400, temperature=0)
weather = tool(get_weather)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def text() -> None:
    check_greeting(model.invoke(GREETING["question"]).text)


def stream() -> None:
    check_greeting("".join(chunk.text for chunk in model.stream(GREETING["question"])))


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        check_person(model.with_structured_output(Person, method=method).invoke(PERSON["question"]))


def tools() -> None:
    bound = model.bind_tools([weather], parallel_tool_calls=False)
    for is_streamed in (False, True):
        messages: list[Any] = [HumanMessage(WEATHER["question"])]
        message = merged(bound, messages) if is_streamed else bound.invoke(messages)
        [call] = message.tool_calls
        messages += [message, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
        check_weather((merged(bound, messages) if is_streamed else bound.invoke(messages)).text)
    state = create_agent(model, [weather]).invoke({"messages": [HumanMessage(WEATHER["question"])]})
    check_weather(state["messages"][-1].text)


def merged(bound: Any, messages: list[Any]) -> Any:
    first, *others = bound.stream(messages)
    for chunk in others:
        first += chunk
    return first


run(
    ("langchain-anthropic", "langchain", "anthropic"),
    {"text": text, "stream": stream, "structured": structured, "tools": tools},
)
