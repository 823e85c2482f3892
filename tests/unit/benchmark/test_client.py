"""The client reads any server's stream, whatever it sends; its chunks get the time of their arrival."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import pytest

from serve_app.benchmark.client import Client
from serve_app.benchmark.rows import Outcome, Row
from testkit.http.api import serving


def server(pieces: Sequence[bytes], status: int = 200) -> Callable[..., Any]:
    """Return an ASGI application that answers with these pieces."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-model-replica", b"r1")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "text": content, "finish_reason": None, **fields}])


async def answered(*pieces: bytes, status: int = 200) -> Row:
    row = Row(0, 1, 1, 0.0)
    ticks = iter(range(1000))
    async with serving(server(pieces, status)) as url, aiohttp.ClientSession() as session:
        await Client(session, f"{url}/v1/completions", lambda: float(next(ticks))).run(b"{}", row)
    return row


LAST = text("", finish_reason="length")
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})


async def test_tokens_are_counted_by_ids_and_usage() -> None:
    row = await answered(text("ab", token_ids=[1, 2]) + text("c", token_ids=[3]), LAST, USAGE, b"data: [DONE]\n\n")
    assert (row.outcome, row.token_ids, row.num_tokens) == (Outcome.OK, [1, 2, 3], 3)
    assert (row.usage_prompt_tokens, row.usage_output_tokens, row.replica_id) == (7, 5, "r1")


async def test_chunks_that_arrive_together_are_one_arrival() -> None:
    row = await answered(text("a") + text("b") + LAST)
    assert row.chunk_tokens == [2] and len(row.chunk_s) == 1


async def test_a_role_alone_is_no_token_but_reasoning_is() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": "stop"}])
    assert (await answered(role)).chunk_s == []
    assert (await answered(role + thought)).chunk_tokens == [1]


async def test_comments_and_other_line_ends_and_split_events_are_read() -> None:
    whole = b": keep-alive\r\n\r\n" + text("a").replace(b"\n", b"\r\n").replace(b"data: ", b"data:") + LAST
    row = await answered(whole[:40], whole[40:])
    assert (row.outcome, row.chunk_tokens) == (Outcome.OK, [1])


@pytest.mark.parametrize(
    ("pieces", "status", "outcome", "code"),
    [
        ((text("a"), event(error={"message": "lost", "code": "gone"})), 200, Outcome.STREAM_ERROR, "gone"),
        ((text("a"),), 200, Outcome.TRUNCATED, None),
        ((b"data: nonsense\n\n", LAST), 200, Outcome.FAILED, "client:MalformedEvent"),
        ((b'data: {"choices": [3]}\n\n', LAST), 200, Outcome.FAILED, "client:MalformedEvent"),
        ((b'{"error": {"message": "wait", "code": "slow_down"}}',), 429, Outcome.REFUSED, "slow_down"),
        ((b"<html>bad gateway</html>",), 502, Outcome.SERVER_ERROR, "<html>bad gateway</html>"),
    ],
)  # fmt: skip
async def test_failures_have_distinct_outcomes(
    pieces: tuple[bytes, ...], status: int, outcome: Outcome, code: str | None
) -> None:
    row = await answered(*pieces, status=status)
    assert (row.outcome, row.error_code) == (outcome, code)
    assert row.end_s is not None


async def test_an_absent_server_fails_the_request_alone() -> None:
    row = Row(0, 1, 1, 0.0)
    async with aiohttp.ClientSession() as session:
        await Client(session, "http://127.0.0.1:1/v1/completions", lambda: 0.0).run(b"{}", row)
    assert row.outcome is Outcome.FAILED and "127.0.0.1:1" in (row.error_message or "")
