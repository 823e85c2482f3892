"""Clients of the real engine: the stock client is served, and clients that go away leave nothing behind."""

import asyncio
import json
import random

import openai
import pytest

from testkit.limits import LIMIT_S
from tests.service.conftest import MODEL, Service

NUM_CONNECTIONS = 2000
NUM_AT_ONCE = 100


async def drop(service: Service, rng: random.Random) -> None:
    """Send a request by hand, read a little or nothing, and cut the connection."""
    host, port = service.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [rng.randrange(3, 400) for _ in range(rng.randint(1, 60))],
            "max_tokens": 200,
            "n": rng.choice([1, 1, 1, 3]),
            "ignore_eos": True,
            "stream": rng.random() < 0.7,
            "priority": rng.randrange(3),
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    message = head.encode() + b"\r\n\r\n" + body
    try:
        writer.write(message[: rng.randint(1, len(message))] if rng.random() < 0.1 else message)
        await writer.drain()
        if rng.random() < 0.8:
            async with asyncio.timeout(rng.uniform(0, 1.0)):
                await reader.readexactly(rng.randint(1, 4000))
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()


async def test_dropped_connections_leave_no_block_and_no_task(service: Service) -> None:
    rng = random.Random(4)
    tasks_before = len(asyncio.all_tasks())
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def one() -> None:
        async with gate:
            await drop(service, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CONNECTIONS):
            group.create_task(one())
    async with asyncio.timeout(LIMIT_S):
        while (stats := service.engine.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.01)
        while len(asyncio.all_tasks()) > tasks_before:
            await asyncio.sleep(0.01)
    assert stats.num_free_blocks == stats.num_blocks
    answer = await service.openai.completions.create(model=MODEL, prompt="still there?", max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")
    aborted = [
        metric.value
        for metric in service.engine.metrics().metrics
        if metric.name == "vllm:request_success" and ("finished_reason", "abort") in metric.labels
    ]
    assert aborted[0] > NUM_CONNECTIONS / 20, "too few were cut while they were being served"


async def test_the_model_is_listed(service: Service) -> None:
    assert [model.id async for model in service.openai.models.list()] == [MODEL]


async def test_a_completion_of_several_prompts_and_choices(service: Service) -> None:
    reply = await service.openai.completions.create(
        model=MODEL, prompt=["the quick", "brown fox"], n=3, max_tokens=5, seed=7, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage is not None and reply.usage.completion_tokens == 30


async def test_choices_of_a_streamed_chat_run_side_by_side(service: Service) -> None:
    texts = [""] * 4
    async for chunk in await service.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "the quick brown fox"}], n=4, max_tokens=12,
        temperature=1.0, seed=3, stream=True, extra_body={"ignore_eos": True},
    ):  # fmt: skip
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert len(set(texts)) == 4


async def test_an_unknown_model_is_a_404(service: Service) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await service.openai.completions.create(model="another", prompt="x")
    assert caught.value.code == "model_not_found"
