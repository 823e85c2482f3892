"""A question, the model's call, its result and the answer, with the stock client, the real engine and a scripted model.

The model ends by itself, so everything that a grammar binds here is also what the model writes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.limits import LIMIT_S
from testkit.model.scripted_checkpoint import Script, write_scripted_checkpoint
from tests.service.test_documents import MODEL as DOCUMENTED_MODEL
from tests.service.test_documents import ROOT, URL, blocks_of

MODEL = "scripted"
ANSWER = "It is sunny in Paris, with 18 degrees."
SCRIPTS = (
    Script("Hello."),
    Script('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', ("weather in Paris",)),
    Script(ANSWER, ("18 degrees",), rank=1),
    Script('{"name": "Ada Lovelace", "age": 36}', ("Extract the person",)),
    Script("<think>\nThe tenths decide.\n</think>\n\n9.9 is larger.", ("9.9 or 9.11",)),
)
CHANNELS = (
    Script("Hello."),
    Script(
        "<|channel|>analysis<|message|>They want the time.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_time <|constrain|>json<|message|>{"city": "New York"}<|call|>',
        ("time in New York",),
    ),
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Return the models by the family of their calls; None: it is found."""
    scripts = {None: SCRIPTS, "harmony": CHANNELS}
    folder = tmp_path_factory.mktemp("scripted")
    return {name: write_scripted_checkpoint(folder / str(name), each) for name, each in scripts.items()}


@pytest.fixture
def tool_call_parser() -> str | None:
    return None


@pytest.fixture
async def client(
    checkpoints: dict[str | None, Path], tool_call_parser: str | None
) -> AsyncIterator[openai.AsyncOpenAI]:
    model = str(checkpoints[tool_call_parser])
    options = ReplicaOptions(
        ModelOptions(model, dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**22),
        EngineLimits(max_num_seqs=4),
    )
    settings = IngressSettings(model=model, served_model_name=MODEL, tool_call_parser=tool_call_parser)
    async with (
        local_service(options, settings) as local,
        openai.AsyncOpenAI(api_key="none", base_url=f"{local.url}/v1", max_retries=0) as client,
    ):
        yield client


async def complete(client: openai.AsyncOpenAI, messages: list[Any], stream: bool, **fields: Any) -> Any:
    """Return the choice of a chat, through the client's own accumulation of chunks if `stream`."""
    arguments = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
    if not stream:
        return (await client.chat.completions.create(**arguments)).choices[0]
    async with client.chat.completions.stream(**arguments) as events:
        return (await events.get_final_completion()).choices[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_and_its_result_give_the_answer(client: openai.AsyncOpenAI, stream: bool, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = await complete(client, messages, stream, tools=TOOLS, tool_choice=choice)
    assert first.finish_reason == "tool_calls" and not first.message.content
    [call] = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 18 degrees"}
    messages += [first.message.model_dump(exclude_none=True), result]
    second = await complete(client, messages, stream, tools=TOOLS)
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", ANSWER, None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_of_an_unwilling_model_is_valid(client: openai.AsyncOpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_news"}}, *TOOLS]
    messages: list[Any] = [{"role": "user", "content": "Hello?"}]
    choice = {"type": "function", "function": {"name": "get_news"}}
    reply = await complete(client, messages, stream, tools=tools, tool_choice=choice)
    [call] = reply.message.tool_calls
    assert reply.finish_reason == "tool_calls" and call.function.name == "get_news"
    assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_parse_helper_gives_the_object(client: openai.AsyncOpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Extract the person: Ada Lovelace, 36."}]
    if stream:
        choice = await complete(client, messages, stream, response_format=Person)
    else:
        reply = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
        choice = reply.choices[0]
    assert choice.message.parsed == Person(name="Ada Lovelace", age=36)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_from_the_answer(client: openai.AsyncOpenAI, stream: bool) -> None:
    choice = await complete(client, [{"role": "user", "content": "Which is larger, 9.9 or 9.11?"}], stream)
    assert choice.message.content.strip() == "9.9 is larger."
    assert choice.message.reasoning_content.strip() == "The tenths decide."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_within_a_call_finishes_no_call(client: openai.AsyncOpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    cut = await complete(client, messages, stream, tools=TOOLS, stop=["aris"])
    assert cut.finish_reason == "stop"
    [call] = cut.message.tool_calls
    assert call.function.arguments == '{"city": "P'
    for stop in ("</tool_call>", "not there"):
        whole = await complete(client, messages, stream, tools=TOOLS, stop=[stop])
        assert whole.finish_reason == "tool_calls" and not whole.message.content
        assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool_call_parser", ["harmony"])
async def test_a_call_follows_the_reasoning_of_a_channel(client: openai.AsyncOpenAI, stream: bool) -> None:
    time: Any = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": "What is the current time in New York?"}]
    reply = await complete(client, messages, stream, tools=time)
    assert reply.finish_reason == "tool_calls" and not reply.message.content
    assert reply.message.reasoning == "They want the time."
    [call] = reply.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"city": "New York"})


async def test_the_documented_call_prints_what_the_document_shows(client: openai.AsyncOpenAI) -> None:
    (_, program), (_, output) = list(blocks_of(ROOT / "docs" / "tools.md"))[:2]
    program = program.replace(f"{URL}/v1", str(client.base_url)).replace(DOCUMENTED_MODEL, MODEL)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(LIMIT_S):
        assert (await process.communicate())[0].decode() == output
