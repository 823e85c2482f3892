"""DSPy: predictions, its stream of a field, typed fields, and ReAct, whose calls are text."""

from typing import Any

import dspy
from pydantic import BaseModel
from ways import API_KEY, BASE_URL, GREETING, MODEL, PERSON, STEPWISE, check_greeting, check_person, check_weather, run
from ways import get_weather as weather

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=API_KEY, cache=False, num_retries=0))


class Person(BaseModel):
    name: str
    age: int


class Extract(dspy.Signature):
    """Extract it."""

    text: str = dspy.InputField()
    person: Person = dspy.OutputField()


def text() -> None:
    check_greeting(dspy.Predict("question -> answer")(question=GREETING["question"]).answer)


async def stream() -> None:
    predict = dspy.Predict("question -> answer")
    listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
    parts: list[Any] = [
        part async for part in dspy.streamify(predict, stream_listeners=listeners)(question=GREETING["question"])
    ]
    check_greeting(parts[-1].answer)
    assert len(parts) > 1, "there was no part before the prediction"


def structured() -> None:
    check_person(dspy.Predict(Extract)(text=PERSON["question"]).person)


def tools() -> None:
    agent = dspy.ReAct("question -> answer", tools=[weather])
    check_weather(agent(question=STEPWISE["question"]).answer, STEPWISE)


run(("dspy", "litellm"), {"text": text, "stream": stream, "structured": structured, "tools": tools})
