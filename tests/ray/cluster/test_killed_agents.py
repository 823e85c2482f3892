"""Agents' streams whose replica is killed: both protocols go on in mid-block, and end as undisturbed ones do."""

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from testkit.http.message_events import checked, read_messages
from testkit.http.response_events import checked_response, read_responses
from testkit.limits import LIMIT_S, until
from testkit.serving.raylets import Raylets
from tests.ray.conftest import MODEL_NAME

pytestmark = pytest.mark.rotated

NUM_TOKENS, NUM_BEFORE = 3500, 8
"""Output tokens of a text, and deltas of a stream that is in its middle."""
PIECES = {"type": "array", "items": {"type": "string", "minLength": 12, "maxLength": 20}, "minItems": 60}
SCHEMA = {
    "type": "object",
    "properties": {"pieces": PIECES | {"maxItems": 60}},
    "required": ["pieces"],
    "additionalProperties": False,
}
"""Schema of a tool's input that has many hundred tokens."""
MESSAGE = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": NUM_TOKENS}
TOOL = {"name": "write", "input_schema": SCHEMA, "strict": True}
RESPONSE = {"input": "the quick brown fox", "max_output_tokens": NUM_TOKENS}
FUNCTION = {"type": "function", "name": "write", "parameters": SCHEMA, "strict": True}
CUSTOM = {"type": "custom", "name": "note"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", MESSAGE),
    ("/v1/messages", MESSAGE | {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", RESPONSE | {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}),
    ("/v1/responses", RESPONSE | {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "note"}}),
]


@dataclass
class Stream:
    """One stream as a client reads it."""

    path: str
    replica_id: str | None = None
    text: str = ""
    is_over: bool = False

    async def read(self, http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        body = {"model": MODEL_NAME, "temperature": 0.0, "stream": True, **fields}
        async with http.stream("POST", self.path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            self.replica_id = response.headers["x-model-replica"]
            async for part in response.aiter_text():
                self.text += part
        self.is_over = True

    @property
    def is_in_its_middle(self) -> bool:
        return self.text.count("delta") >= NUM_BEFORE

    def answer(self) -> dict[str, Any]:
        """Return what a strict client reads of the events, without ids and times."""
        if self.path == "/v1/messages":
            message = checked(read_messages(self.text)).message
            assert message["stop_reason"] in ("max_tokens", "tool_use"), message["stop_reason"]
            message["content"] = [block | {"id": None} for block in message["content"]]
            return message | {"id": None, "usage": message["usage"]["output_tokens"]}
        response = checked_response(read_responses(self.text)).response
        assert response["status"] in ("completed", "incomplete"), response["error"]
        output = [item | {"id": None, "call_id": None} for item in response["output"]]
        usage = response["usage"]["output_tokens"]
        return {"output": output, "status": response["status"], "usage": usage}


async def answers(served: Raylets, *, kills: bool) -> list[dict[str, Any]]:
    """Return the answers of all requests; if `kills`, a replica is killed that is in mid-stream with both protocols."""
    http = httpx.AsyncClient(base_url=served.app.url, timeout=LIMIT_S, trust_env=False)
    streams: list[Stream] = []
    async with http, asyncio.TaskGroup() as group:

        async def begin(path: str, fields: dict[str, Any]) -> Stream:
            streams.append(stream := Stream(path))
            group.create_task(stream.read(http, fields))
            await until(lambda: stream.is_in_its_middle)
            return stream

        for path, fields in REQUESTS:
            await begin(path, fields)
        if kills:
            victim = streams[0].replica_id
            while victim not in [stream.replica_id for stream in streams if stream.path == "/v1/responses"]:
                await begin("/v1/responses", RESPONSE | {"input": f"{len(streams)} brown foxes"})
            pids = {replica["replica_id"]: replica["pid"] for replica in await asyncio.to_thread(served.replicas)}
            os.kill(pids[str(victim)], signal.SIGKILL)
            assert {s.path for s in streams if s.replica_id == victim and not s.is_over} == {p for p, _ in REQUESTS}
    return [stream.answer() for stream in streams][: len(REQUESTS)]


async def test_streams_of_a_killed_replica_go_on_with_every_event_in_its_place(served: Raylets) -> None:
    calm = await answers(served, kills=False)
    assert await answers(served, kills=True) == calm
