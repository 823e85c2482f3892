"""instructor: objects by tools, by JSON Schema and by JSON, whole and in parts."""

from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, check_greeting, check_person, run

openai = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)


class Person(BaseModel):
    name: str
    age: int


def ask(mode: Any, method: str = "create", **fields: Any) -> Any:
    client = instructor.from_openai(openai, mode=mode)
    messages = [{"role": "user", "content": PERSON["question"]}]
    return getattr(client.chat.completions, method)(
        model=MODEL, messages=messages, response_model=Person, max_retries=0, **fields
    )


def text() -> None:
    client = instructor.from_openai(openai)
    messages = [{"role": "user", "content": GREETING["question"]}]
    reply = client.chat.completions.create(model=MODEL, messages=messages, response_model=None)
    check_greeting(reply.choices[0].message.content)


def stream() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        *_, last = ask(mode, "create_partial")
        check_person(last)


def structured() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        check_person(ask(mode))


def tools() -> None:
    check_person(ask(instructor.Mode.TOOLS))
    check_person(ask(instructor.Mode.TOOLS_STRICT))


run(("instructor", "openai"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
