"""llama-index with `OpenAILike`: chat, stream, structured prediction, and an agent's loop of tools."""

from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
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

llm = OpenAILike(
    model=MODEL, api_base=BASE_URL, api_key=API_KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0,
    context_window=4096,
)  # fmt: skip
tool = FunctionTool.from_defaults(get_weather)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def user(question: str) -> ChatMessage:
    return ChatMessage(role="user", content=question)


def text() -> None:
    check_greeting(llm.chat([user(GREETING["question"])]).message.content)


def stream() -> None:
    check_greeting("".join(part.delta or "" for part in llm.stream_chat([user(GREETING["question"])])))


def structured() -> None:
    structured_llm = llm.as_structured_llm(Person)
    check_person(structured_llm.chat([user(PERSON["question"])]).raw)


def tools() -> None:
    for is_streamed in (False, True):
        messages = [user(WEATHER["question"])]
        reply = answer(messages, is_streamed)
        [call] = llm.get_tool_calls_from_response(reply)
        result = tool.call(**call.tool_kwargs)
        about = {"tool_call_id": call.tool_id}
        messages += [reply.message, ChatMessage(role="tool", content=str(result), additional_kwargs=about)]
        check_weather(answer(messages, is_streamed).message.content)


def answer(messages: list[Any], is_streamed: bool) -> Any:
    if not is_streamed:
        return llm.chat_with_tools([tool], chat_history=messages)
    *_, last = llm.stream_chat_with_tools([tool], chat_history=messages)
    return last


run(
    ("llama-index-llms-openai-like", "openai"),
    {"text": text, "stream": stream, "structured": structured, "tools": tools},
)
