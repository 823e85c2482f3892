"""Streams over time: the moment of the headers, comments in silences, and failures, which end all choices."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from replicas.errors import ReplicaLost, RequestAborted
from testkit.http.api import MODEL, Api, MakeApi, events, serving
from testkit.limits import LIMIT_S, until

IMPATIENT = {"x-stainless-read-timeout": "0.1"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "stream": True, **fields}


@contextlib.asynccontextmanager
async def streaming(api: Api, headers: dict[str, str] | None = None) -> AsyncIterator[httpx.Response]:
    """Stream a completion from a real server; yield the response when its headers are there."""
    async with (
        serving(api.app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/completions", json=body(), headers=headers) as response,
    ):
        assert response.status_code == 200
        yield response


async def test_headers_wait_for_the_first_delta(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    api = make_api(first_token_gate=gate)
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as client:
        response = asyncio.create_task(client.post("/v1/completions", json=body()))
        await until(lambda: bool(api.replica.running))
        done, _ = await asyncio.wait({response}, timeout=0.1)
        assert not done
        gate.set()
        text = (await response).text
    assert "keep-alive" not in text
    assert events(text)[-1] == "[DONE]"


async def test_a_waiting_client_gets_headers_and_comments(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    async with streaming(make_api(first_token_gate=gate), IMPATIENT) as response:
        lines = response.aiter_lines()
        assert {line for _ in range(3) if (line := await anext(lines))} == {": keep-alive"}
        gate.set()
        assert "data: [DONE]" in [line async for line in lines]


async def test_stock_client_outlasts_its_own_read_time_out(make_api: MakeApi) -> None:
    api = make_api(ttft_s=5)
    async with serving(api.app) as url:
        client = openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1", timeout=4, max_retries=0)
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == "".join(token.text for token in api.replica.script[:16])


@pytest.mark.parametrize("header", ["x-stainless-read-timeout", "x-stainless-timeout"])
async def test_client_without_patience_gets_no_flood_of_comments(make_api: MakeApi, header: str) -> None:
    api = make_api(ttft_s=1.2)
    started_s = time.monotonic()
    response = await api.http.post("/v1/completions", json=body(), headers={header: "0.000001"})
    elapsed_s = time.monotonic() - started_s
    assert 1 <= response.text.count(": keep-alive") <= elapsed_s / 0.5
    assert events(response.text)[-1] == "[DONE]"


async def test_silence_amid_a_stream_is_filled(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    api = make_api(gate=gate, gate_at=2, settings={"keep_alive_s": 0.02})
    text = ""
    async with streaming(api) as response:
        async for part in response.aiter_text():
            text += part
            if text.count("keep-alive") == 3:
                gate.set()
    *chunks, done = events(text)
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "".join(token.text for token in api.replica.script[:16])
    assert done == "[DONE]"


async def test_a_comment_that_cannot_be_sent_aborts_the_sequences(make_api: MakeApi) -> None:
    api = make_api(first_token_gate=asyncio.Event(), settings={"max_header_wait_s": 0.02, "keep_alive_s": 0.02})
    parts: list[bytes] = []
    requests = [{"type": "http.request", "body": json.dumps(body()).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            if len(parts) == 2:
                raise BrokenPipeError
            parts.append(message["body"])

    path = "/v1/completions"
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        await api.app(scope, receive, send)
    assert parts == [b": keep-alive\n\n"] * 2
    assert len(api.replica.aborted) == 1


async def test_a_failure_after_the_headers_is_an_event(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    api = make_api(first_token_gate=gate, fail_at=0, error=ReplicaLost("gone"), settings={"max_header_wait_s": 0.02})
    async with streaming(api) as response:
        gate.set()
        text = (await response.aread()).decode()
    assert [json.loads(item)["error"]["code"] for item in events(text)] == ["replica_lost"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_choice_ends_all_at_once(make_api: MakeApi, stream: bool) -> None:
    api = make_api(
        fail_at=1,
        error=ReplicaLost("gone"),
        fail_only=lambda request: request.request_id.endswith("-1"),
        gate=asyncio.Event(),
        gate_at=3,
    )
    response = await api.complete(n=3, stream=stream)
    if stream:
        assert json.loads(events(response.text)[-1])["error"]["code"] == "replica_lost"
    else:
        assert response.status_code == 502
    assert not api.replica.running
    assert len(api.replica.aborted) == 3


async def test_request_cancelled_elsewhere_is_answered(make_api: MakeApi) -> None:
    api = make_api(fail_at=3, error=RequestAborted("cancelled by id"))
    assert (await api.complete()).status_code == 499
    failure = json.loads(events((await api.complete(stream=True)).text)[-1])
    assert failure["error"]["code"] == "request_aborted"


async def test_cancelled_generator_does_not_leave_the_client_waiting(make_api: MakeApi) -> None:
    assert (await make_api(fail_at=1, error=asyncio.CancelledError()).complete()).status_code == 499


async def test_finished_streams_are_not_aborted(api: Api) -> None:
    await api.complete(n=4)
    await api.complete(n=4, stream=True)
    assert len(api.replica.finished) == 8
    assert not api.replica.aborted


async def test_slow_reader_holds_the_stream_back(make_api: MakeApi) -> None:
    """While the client does not read, at most the sockets' buffers fill; the rest waits in the engine's mailbox."""
    api = make_api(settings={"keep_alive_s": 60.0})
    text = "x" * 20_000
    api.replica.script = [type(token)(token.token_id, text) for token in api.replica.script]
    async with serving(api.app) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        payload = json.dumps(chat).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + payload)
        await reader.readline()
        counts: list[int] = []
        while len(counts) < 3 or counts[-1] != counts[-3]:
            counts.append(api.replica.num_deltas)
            await asyncio.sleep(0.05)
        assert 0 < api.replica.num_deltas < 240
        writer.close()
        await until(lambda: not api.replica.running)
