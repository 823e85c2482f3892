"""Outlines over an OpenAI-compatible server: text, streams and typed output; it has no tools."""

import json

import outlines
from openai import OpenAI
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, check_greeting, check_person, run

model = outlines.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0), MODEL)


class Person(BaseModel):
    name: str
    age: int


def text() -> None:
    check_greeting(model(GREETING["question"]))


def stream() -> None:
    check_greeting("".join(model.stream(GREETING["question"])))


def structured() -> None:
    check_person(json.loads(model(PERSON["question"], Person)))


run(("outlines", "openai"), {"text": text, "stream": stream, "structured": structured})
