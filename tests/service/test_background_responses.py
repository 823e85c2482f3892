"""Responses in the background, whose service is killed: each ends once, and every reader sees every event once."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.http.response_events import checked_response, read_responses
from testkit.http.service_process import MODEL, KilledService, killed_service
from testkit.limits import LIMIT_S, until

pytestmark = pytest.mark.rotated

DEMO = str(Path(__file__).resolve().parents[2] / "replicas" / "demo")
NUM_TOKENS = 320
NEW_EVENTS = 3
"""New events, between two kills, of half the readers that have not ended."""
PIECES = {"type": "array", "items": {"type": "string", "minLength": 8, "maxLength": 12}, "minItems": 32, "maxItems": 32}
SCHEMA = {
    "type": "object", "properties": {"pieces": PIECES}, "required": ["pieces"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "name": "write", "parameters": SCHEMA, "strict": True}
FORMS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"ignore_eos": True},
    {"text": {"format": {"type": "json_schema", "name": "pieces", "schema": SCHEMA, "strict": True}}},
]


def body_of(number: int) -> dict[str, Any]:
    """Return the body of a response: half have a seed, half a tool or a schema."""
    seed = {} if number // 2 % 2 else {"seed": number}
    text = f"Write something about the number {number}."
    return {"model": MODEL, "input": text, "max_output_tokens": NUM_TOKENS, **FORMS[number % len(FORMS)], **seed}


@dataclass
class Reader:
    """Client that follows a response, and comes back behind the last event that it has."""

    service: KilledService
    number: int
    response_id: str | None = None
    text: str = ""
    num_connections: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events that have arrived whole."""
        whole = self.text.rpartition("\n\n")[0]
        return [json.loads(line[6:]) for line in whole.splitlines() if line.startswith("data: {")]

    @property
    def num_events(self) -> int:
        return self.text.count('"sequence_number"')

    @property
    def has_ended(self) -> bool:
        """True if the response has ended."""
        return self.text.endswith("data: [DONE]\n\n")

    async def read(self) -> None:
        """Read the response to its end."""
        while not self.has_ended:
            url = self.service.url
            try:
                if url is not None:
                    await self._follow(url)
            except httpx.HTTPError:
                pass
            self.text = self.text[: self.text.rfind("\n\n") + 2] if "\n\n" in self.text else ""
            await asyncio.sleep(0.05)

    async def _follow(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
            if self.response_id is None:
                body = {**body_of(self.number), "background": True, "stream": True}
                request = http.build_request("POST", "/v1/responses", json=body)
            else:
                after = self.events[-1]["sequence_number"] if self.events else -1
                parameters = {"stream": "true", "starting_after": str(after)}
                request = http.build_request("GET", f"/v1/responses/{self.response_id}", params=parameters)
            response = await http.send(request, stream=True)
            if response.status_code != 200:
                return
            self.num_connections += 1
            async for part in response.aiter_text():
                self.text += part
                if self.response_id is None and self.num_events:
                    self.response_id = self.events[0]["response"]["id"]


@dataclass
class Outcome:
    readers: list[Reader]
    again: list[str] = field(default_factory=list)
    whole: list[dict[str, Any]] = field(default_factory=list)


async def progress(readers: list[Reader]) -> None:
    """Return when half the readers that have not ended have new events, or have ended."""
    running = [(reader, reader.num_events + NEW_EVENTS) for reader in readers if not reader.has_ended]
    await until(lambda: 2 * sum(one.has_ended or one.num_events >= wanted for one, wanted in running) >= len(running))
    assert not all(reader.has_ended for reader in readers), "nothing runs that a kill could meet"


async def run(folder: Path, num_responses: int, num_kills: int) -> Outcome:
    """Make responses while their service is killed; read each once more at the end."""
    folder.mkdir()
    with killed_service(DEMO, folder) as service:
        outcome = Outcome([Reader(service, number) for number in range(num_responses)])
        reading = asyncio.gather(*(reader.read() for reader in outcome.readers))
        for _ in range(num_kills):
            await progress(outcome.readers)
            service.kill()
            await asyncio.to_thread(service.start)
        await reading
        async with httpx.AsyncClient(base_url=service.url or "", timeout=LIMIT_S) as http:
            for reader in outcome.readers:
                path = f"/v1/responses/{reader.response_id}"
                outcome.again.append((await http.get(path, params={"stream": "true"})).text)
                outcome.whole.append((await http.get(path)).json())
    return outcome


def check(outcome: Outcome) -> None:
    """Check that each reader saw every event once, as a second reader does, and that each response has one end."""
    for reader, again, whole in zip(outcome.readers, outcome.again, outcome.whole, strict=True):
        assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
        shown = "".join(part + "\n\n" for part in reader.text.split("\n\n")[:-1] if not part.startswith(":"))
        assert shown == again, reader.number
        stream = checked_response(read_responses(again))
        assert stream.state in ("completed", "incomplete")
        assert whole == reader.events[-1]["response"]
        assert whole["usage"]["output_tokens"] <= NUM_TOKENS


def seeded_outputs(outcome: Outcome) -> list[str]:
    """Return the texts and arguments of the responses with a seed."""
    whole = [response for number, response in enumerate(outcome.whole) if "seed" in body_of(number)]
    return [
        "".join(item.get("arguments") or item["content"][0]["text"] for item in response["output"])
        for response in whole
    ]


async def test_a_response_whose_server_dies_while_its_client_waits_has_failed(tmp_path: Path) -> None:
    with killed_service(DEMO, tmp_path) as service:
        body = {**body_of(0), "stream": True}
        text = ""
        with contextlib.suppress(httpx.HTTPError):
            async with (
                httpx.AsyncClient(base_url=service.url or "", timeout=LIMIT_S) as http,
                http.stream("POST", "/v1/responses", json=body) as response,
            ):
                async for part in response.aiter_text():
                    text += part
                    service.kill()
        assert "[DONE]" not in text
        path = f"/v1/responses/{json.loads(text.partition('data: ')[2].partition(chr(10))[0])['response']['id']}"
        await asyncio.to_thread(service.start)
        async with httpx.AsyncClient(base_url=service.url or "", timeout=LIMIT_S) as http:
            async with asyncio.timeout(LIMIT_S):
                while (stored := (await http.get(path)).json())["status"] == "in_progress":
                    await asyncio.sleep(0.1)
    assert (stored["status"], stored["error"]["type"]) == ("failed", "replica_lost")


@pytest.mark.parametrize(
    ("num_responses", "num_kills"), [(6, 2), pytest.param(50, 10, marks=pytest.mark.deep)], ids=["few", "many"]
)
async def test_responses_in_the_background_survive_kills(tmp_path: Path, num_responses: int, num_kills: int) -> None:
    outcome = await run(tmp_path / "killed", num_responses, num_kills)
    check(outcome)
    assert sum(reader.num_connections > 1 for reader in outcome.readers) >= num_responses // 2
    undisturbed = await run(tmp_path / "undisturbed", num_responses, 0)
    check(undisturbed)
    assert seeded_outputs(outcome) == seeded_outputs(undisturbed)
