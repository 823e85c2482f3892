"""A client that disconnects, at any moment, leaves no sequence running; over real connections."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from testkit.http.api import MODEL, Api, MakeApi, serving
from testkit.limits import until


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": ["hi", "ho"], "n": 2, **fields}


async def leave_once(api: Api, client: httpx.AsyncClient, **fields: Any) -> None:
    """Send a request, drop the connection when its four sequences run, and return when none runs any more."""
    request = asyncio.create_task(client.post("/v1/completions", json=body(**fields)))
    await until(lambda: len(api.replica.running) == 4)
    request.cancel()
    await asyncio.wait({request})
    await until(lambda: not api.replica.running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gate", ["first_token_gate", "gate"], ids=["queued", "amid generation"])
async def test_leaving_aborts_every_sequence(make_api: MakeApi, gate: str, stream: bool) -> None:
    api = make_api(gate_at=2, **{gate: asyncio.Event()})
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as client:
        await leave_once(api, client, stream=stream)
    assert len(api.replica.aborted) == 4


async def test_leaving_is_logged_as_499(make_api: MakeApi, caplog: pytest.LogCaptureFixture) -> None:
    api = make_api(gate=asyncio.Event(), gate_at=2)
    with caplog.at_level("INFO", "serve_app"):
        async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as client:
            for stream in (False, True):
                await leave_once(api, client, stream=stream)
            await until(lambda: len(_ends(caplog)) == 2)
    assert [record.__dict__["status"] for record in _ends(caplog)] == [499, 499]


def _ends(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.message == "request finished"]


async def test_many_connections_dropped_at_random_leave_no_task(make_api: MakeApi) -> None:
    api = make_api(ttft_s=0.003, tpot_s=0.001)
    rng = random.Random(7)
    async with serving(api.app) as url:
        num_tasks = len(asyncio.all_tasks())
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits) as client:

            async def drop_one() -> None:
                fields = body(stream=rng.random() < 0.5, max_tokens=rng.choice([1, 16]))
                try:
                    async with asyncio.timeout(rng.random() * 0.08):
                        await client.post("/v1/completions", json=fields)
                except TimeoutError:
                    pass

            for _ in range(6):
                await asyncio.gather(*(drop_one() for _ in range(25)))
        await until(lambda: not api.replica.running)
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
    assert len(api.replica.finished) + len(api.replica.aborted) == len(api.replica.started)
    assert api.replica.aborted
