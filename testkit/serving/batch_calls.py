"""Calls of the batch API through OpenAI's client."""

from __future__ import annotations

import io
import json
from typing import Any

import openai

from testkit.serving.served import wait_for

MODEL_NAME = "tiny-llama"
_CHAT = "/v1/chat/completions"


def chat_body(text: str = "the quick", **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    defaults = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return {"model": MODEL_NAME, "messages": [message], **defaults, **options}


def line(custom_id: str, *, endpoint: str = _CHAT, **options: Any) -> str:
    body = chat_body(**options)
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body})


def upload(client: openai.OpenAI, *lines: str) -> Any:
    return client.files.create(file=("requests.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")


def submit(client: openai.OpenAI, *lines: str, window: Any = "24h", endpoint: Any = _CHAT, **options: Any) -> Any:
    file_id = upload(client, *lines).id
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window=window, **options)


def look(client: openai.OpenAI, batch: Any) -> Any:
    return client.batches.retrieve(batch.id)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    final = ("completed", "failed", "expired", "cancelled")
    return wait_for(
        lambda: (found := look(client, batch)).status in final and found, f"{batch.id} has ended", period_s=0.2
    )


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a result file by custom id; check that each is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {found["custom_id"]: found for found in lines}
    assert len(by_id) == len(lines)
    return by_id
