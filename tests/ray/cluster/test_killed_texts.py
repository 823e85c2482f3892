"""A replica is killed in the midst of texts, of a request and of a batch: each text has one vector, the right one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from testkit.limits import START_LIMIT_S
from testkit.model.pooling_checkpoints import expected_vectors
from testkit.serving.raylets import Raylets
from tests.ray.cluster.conftest import kill_busy_replica
from tests.ray.conftest import MODEL_NAME, POOLING

pytestmark = pytest.mark.rotated

NUM_TEXTS, TEXTS_OF_LINE = 600, 10
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
    "of",
    "it",
]


def text(number: int) -> str:
    """Return a text of its own, of 12 to 300 words."""
    return f"{number} " + " ".join(WORDS[(number + place) % len(WORDS)] for place in range(12 + number * 7 % 289))


def body(numbers: range) -> dict[str, Any]:
    return {"model": MODEL_NAME, "input": [text(number) for number in numbers], "encoding_format": "float"}


async def embedded(http: httpx.AsyncClient, numbers: range) -> dict[str, Any]:
    """Return the reply to a request."""
    answer = await http.post("/v1/embeddings", json=body(numbers))
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


async def batch(http: httpx.AsyncClient, lines: list[range]) -> list[dict[str, Any]]:
    """Return the lines of a batch's output, in the order of the file."""
    written = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": body(numbers)}
        for index, numbers in enumerate(lines)
    ]
    data = "\n".join(map(json.dumps, written)).encode()
    file = (await http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    state = (await http.post("/v1/batches", json=asked)).json()
    while state["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.2)
        state = (await http.get(f"/v1/batches/{state['id']}")).json()
    assert state["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}, state
    content = await http.get(f"/v1/files/{state['output_file_id']}/content")
    return [json.loads(line) for line in content.text.splitlines()]


def check(path: Path, reply: dict[str, Any], numbers: range) -> None:
    """Check every 37th vector of a reply against transformers, and that there is one of each text, in order."""
    assert [item["index"] for item in reply["data"]] == list(range(len(numbers)))
    ids = [AutoTokenizer.from_pretrained(path)(text(number))["input_ids"] for number in numbers]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    vectors = torch.tensor([item["embedding"] for item in reply["data"]])
    assert len(vectors.unique(dim=0)) == len(numbers)
    torch.testing.assert_close(vectors[::37], expected_vectors(path, ids[::37], POOLING), atol=1e-5, rtol=0)


async def test_each_text_of_a_killed_replica_is_embedded_once(served: Raylets, checkpoint: Path) -> None:
    lines = [range(first, first + TEXTS_OF_LINE) for first in range(NUM_TEXTS, 2 * NUM_TEXTS, TEXTS_OF_LINE)]
    async with (
        httpx.AsyncClient(base_url=served.app.url, timeout=START_LIMIT_S, trust_env=False) as http,
        asyncio.timeout(START_LIMIT_S),
        asyncio.TaskGroup() as group,
    ):
        reply = group.create_task(embedded(http, range(NUM_TEXTS)))
        outputs = group.create_task(batch(http, lines))
        await kill_busy_replica(served, "num_in_flight")  # Between two steps few texts run.
        assert not reply.done() and not outputs.done(), "the replica was killed too late"
    check(checkpoint, reply.result(), range(NUM_TEXTS))
    by_id = {line["custom_id"]: line["response"]["body"] for line in outputs.result()}
    assert len(outputs.result()) == len(by_id) == len(lines)
    for index, numbers in enumerate(lines):
        check(checkpoint, by_id[str(index)], numbers)
