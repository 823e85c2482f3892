"""Large requests leave the event loop to the others."""

import asyncio
import gc
import json
import sys
import threading
import time
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from serve_app.openai.request.parsing import parse_json
from serve_app.openai.request.schema import ChatBody, CompletionBody, DetokenizeBody
from testkit.http.api import MODEL, Api, MakeApi, card_of

MANY = 300_000
MAX_STANDSTILL_S = 0.05


class Standstill(NamedTuple):
    """Longest standstill of the event loop while a request is answered.

    In processor seconds of this process: time that other processes take is no standstill.
    """

    status: int
    worst_s: float
    whole_s: float


async def standstill(api: Api, path: str, content: bytes) -> Standstill:
    headers = {"content-type": "application/json"}
    begun_s = last_s = time.process_time()
    # Not `api.http`, which checks the answer on the same event loop.
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://test")
    answer = asyncio.create_task(http.post(path, content=content, headers=headers))
    worst_s = 0.0
    while not answer.done():
        await asyncio.sleep(0.001)
        now_s = time.process_time()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    return Standstill(answer.result().status_code, worst_s, last_s - begun_s)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "the quick brown fox " * (MANY // 5)}),
        ("/detokenize", {"tokens": [5] * MANY}),
        ("/v1/completions", {"model": MODEL, "prompt": "the quick brown fox " * (MANY // 5), "max_tokens": 1}),
    ],
)
async def test_event_loop_runs_while_the_tokenizer_works(
    make_api: MakeApi, tokenizer: Any, path: str, body: dict[str, Any]
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=2_000_000)})
    found = await standstill(api, path, json.dumps(body).encode())
    assert found.status == 200
    assert found.worst_s / found.whole_s < 0.5


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/tokenize", b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 190_000) + b"]}"),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b",".join([b'"a"'] * 1_500_000) + b"]}"),
        ("/v1/completions", b"{" + b",".join(b'"%d":1' % number for number in range(600_000)) + b"}"),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b",".join([b"{}"] * 2_000_000) + b"]}"),
        (
            "/v1/completions",
            json.dumps({"model": MODEL, "prompt": ["fox " * 800] * 128, "echo": True, "logprobs": 5}).encode(),
        ),
    ],
    ids=["messages", "prompts", "names", "objects", "echo"],
)
async def test_event_loop_does_not_stand_still_for_a_hopeless_body(
    make_api: MakeApi, tokenizer: Any, path: str, content: bytes
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=8192)})
    found = await standstill(api, path, content)
    assert found.status == 400
    assert found.worst_s < MAX_STANDSTILL_S


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/tokenize", b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 2000) + b"]}"),
        ("/v1/completions", json.dumps({"model": MODEL, "prompt": [[1000] * 4000] * 128, "max_tokens": 1}).encode()),
    ],
    ids=["messages", "token ids"],
)
async def test_event_loop_does_not_stand_still_for_the_largest_body(
    make_api: MakeApi, tokenizer: Any, path: str, content: bytes
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=100_000)})
    await standstill(api, "/tokenize", b'{"messages":[{"role":"user","content":"a"}]}')  # compiles the template
    found = await standstill(api, path, content)
    assert found.worst_s < MAX_STANDSTILL_S


async def test_a_large_reply_is_formatted_outside_of_the_event_loop(make_api: MakeApi, tokenizer: Any) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=8192)})
    threads: set[int] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_append":
            threads.add(threading.get_ident())

    body = {"model": MODEL, "prompt": [5] * 400, "echo": True, "logprobs": 5, "max_tokens": 1}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        for is_streamed in (False, True):
            answer = await api.post("/v1/completions", body | {"stream": is_streamed})
            assert answer.status_code == 200
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert threads and threading.get_ident() not in threads


def test_parsing_does_not_collect_garbage() -> None:
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        fields = parse_json(b'{"prompt": [' + b",".join([b"[1]"] * MANY) + b"]}")
    finally:
        gc.callbacks.remove(note)
    assert isinstance(fields["prompt"], list) and len(fields["prompt"]) == MANY
    assert 2 not in generations
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (ChatBody, {"messages": [{}] * 2000}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"} | dict.fromkeys(map(str, range(2000)))]}),
        (CompletionBody, {"prompt": "a", "stop": [0] * 2000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 2000}),
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(2000)), "a")}),
        (CompletionBody, {"prompt": "a", "metadata": dict.fromkeys(map(str, range(2000)), 1)}),
        (CompletionBody, {"prompt": "a", "stream_options": dict.fromkeys(map(str, range(2000)), 1)}),
        (DetokenizeBody, {"tokens": ["a"] * 2000}),
    ],
)
def test_of_many_faults_only_the_first_is_looked_for(schema: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate({"model": MODEL, **fields})
    assert caught.value.error_count() <= 2
