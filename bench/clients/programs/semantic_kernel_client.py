"""Semantic Kernel: its chat service, and automatic calls of a kernel's functions."""

from typing import Annotated, Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, WEATHER, check_greeting, check_person, check_weather, run
from ways import get_weather as weather


class Person(BaseModel):
    name: str
    age: int


@kernel_function(name="get_weather", description="Return the weather in a city.")
def get_weather(city: Annotated[str, "Name of the city"]) -> str:
    return weather(city)


def service() -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


def history(question: str) -> ChatHistory:
    found = ChatHistory()
    found.add_user_message(question)
    return found


async def answer(question: str, **fields: Any) -> str:
    kernel = Kernel()
    kernel.add_function(plugin_name="weather", function=get_weather)
    settings = OpenAIChatPromptExecutionSettings(**fields)
    return str(await service().get_chat_message_content(history(question), settings, kernel=kernel))


async def text() -> None:
    check_greeting(await answer(GREETING["question"]))


async def stream() -> None:
    chunks = service().get_streaming_chat_message_content(
        history(GREETING["question"]), OpenAIChatPromptExecutionSettings()
    )
    check_greeting("".join([str(chunk) async for chunk in chunks]))


async def structured() -> None:
    check_person(Person.model_validate_json(await answer(PERSON["question"], response_format=Person)))


async def tools() -> None:
    check_weather(await answer(WEATHER["question"], function_choice_behavior=FunctionChoiceBehavior.Auto()))


run(("semantic-kernel", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
