"""Large requests leave the event loop to the others."""

import asyncio
import gc
import json
import sys
import threading
from collections import defaultdict
from types import FrameType
from typing import Any, Self

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from serve_app.jobs.api.records import new_id
from serve_app.openai.request.parsing import parse_json
from serve_app.openai.request.schema import ChatBody, CompletionBody, DetokenizeBody
from testkit.http.api import MODEL, Api, MakeApi, card_of
from testkit.limits import LIMIT_S

MANY = 120_000


class Calls:
    """Threads in which functions, also those of extension modules, were called, by the functions' names.

    Counts only in threads that begin while it is open, and in its own.
    """

    def __init__(self) -> None:
        self._threads: defaultdict[str, set[int]] = defaultdict(set)

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def on_event_loop(self, *names: str) -> list[bool]:
        """Return of each function whether this thread called it."""
        assert all(self._threads[name] for name in names), f"never called: {names}"
        return [threading.get_ident() in self._threads[name] for name in names]

    def num_threads(self, name: str) -> int:
        return len(self._threads[name])

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._threads[frame.f_code.co_name].add(threading.get_ident())
        elif event == "c_call":
            self._threads[argument.__qualname__].add(threading.get_ident())


async def post(api: Api, path: str, content: bytes, **headers: str) -> int:
    """Return the status of the answer, which is not checked on the event loop as `api.http` does."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://test")
    return (await http.post(path, content=content, headers={"content-type": "application/json", **headers})).status_code


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/tokenize", {"prompt": "the quick brown fox " * (MANY // 5)}, "Tokenizer.encode_batch_fast"),
        ("/detokenize", {"tokens": [5] * MANY}, "Tokenizer.decode_batch"),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "the quick brown fox " * (MANY // 5), "max_tokens": 1},
            "Tokenizer.encode_batch_fast",
        ),
    ],
)
async def test_the_tokenizer_works_outside_of_the_event_loop(
    make_api: MakeApi, tokenizer: Any, path: str, body: dict[str, Any], work: str
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=2_000_000)})
    content = json.dumps(body).encode()
    with Calls() as calls:
        assert await post(api, path, content) == 200
    assert calls.on_event_loop("from_json", work) == [False, False]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("body", "is_short"),
    [
        ({"prompt": "fox"}, True),
        ({"prompt": "fox " * 400}, False),
        ({"messages": [{"role": "user", "content": "fox"}]}, True),
        ({"messages": [{"role": "user", "content": "fox " * 400}]}, False),
        ({"messages": [{"role": "user", "content": "fox"}], "tools": [TOOL]}, False),
    ],
)
async def test_a_short_prompt_does_not_go_to_a_thread(make_api: MakeApi, body: dict[str, Any], is_short: bool) -> None:
    api = make_api()
    with Calls() as calls:
        assert await post(api, "/tokenize", json.dumps(body).encode()) == 200
    assert calls.on_event_loop("Tokenizer.encode_batch_fast") == [is_short]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/tokenize", b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 190_000) + b"]}"),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b",".join([b'"a"'] * 1_500_000) + b"]}"),
        ("/v1/completions", b"{" + b",".join(b'"%d":1' % number for number in range(600_000)) + b"}"),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b",".join([b"{}"] * 2_000_000) + b"]}"),
    ],
    ids=["messages", "prompts", "names", "objects"],
)
async def test_a_hopeless_body_is_counted_and_never_parsed(
    make_api: MakeApi, tokenizer: Any, path: str, content: bytes
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=8192)})
    with Calls() as calls:
        assert await post(api, path, content) == 400
    assert calls.on_event_loop("_outside_strings") == [False]
    assert calls.num_threads("from_json") == 0


async def test_hopeless_prompts_are_never_tokenized(make_api: MakeApi, tokenizer: Any) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=8192)})
    body = {"model": MODEL, "prompt": ["fox " * 800] * 128, "echo": True, "logprobs": 5}
    with Calls() as calls:
        assert await post(api, "/v1/completions", json.dumps(body).encode()) == 400
    assert calls.on_event_loop("from_json", "SchemaValidator.validate_python") == [False, False]
    assert calls.num_threads("Tokenizer.encode_batch_fast") == 0


@pytest.mark.parametrize(
    ("path", "content", "work"),
    [
        (
            "/tokenize",
            b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 2000) + b"]}",
            ["apply_chat_template", "Tokenizer.encode_batch_fast"],
        ),
        ("/v1/completions", json.dumps({"model": MODEL, "prompt": [[5] * 1000] * 128, "max_tokens": 1}).encode(), []),
    ],
    ids=["messages", "token ids"],
)
async def test_the_largest_body_is_read_outside_of_the_event_loop(
    make_api: MakeApi, tokenizer: Any, path: str, content: bytes, work: list[str]
) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=100_000)})
    with Calls() as calls:
        assert await post(api, path, content) == 200
    names = ["check_json", "from_json", "SchemaValidator.validate_python", *work]
    assert calls.on_event_loop(*names) == [False] * len(names)


async def test_a_large_reply_is_formatted_outside_of_the_event_loop(make_api: MakeApi, tokenizer: Any) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=8192)})
    body = {"model": MODEL, "prompt": [5] * 400, "echo": True, "logprobs": 5, "max_tokens": 1}
    with Calls() as calls:
        answers = [await api.post("/v1/completions", body | {"stream": is_streamed}) for is_streamed in (False, True)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert calls.on_event_loop("_append") == [False]


async def test_a_reply_to_many_prompts_is_written_outside_of_the_event_loop(make_api: MakeApi) -> None:
    with Calls() as calls:
        answer = await make_api().post("/v1/batch/sync", {"prompts": ["a"] * 100, "max_tokens": 3})
    assert answer.status_code == 200 and len(answer.json()["outputs"]) == 100
    assert calls.on_event_loop("json_in_pieces") == [False]


async def test_outputs_of_a_batch_are_written_outside_of_the_event_loop(api: Api) -> None:
    batch = (await api.post("/v1/batch/async", {"prompts": ["a"] * 100, "max_tokens": 3})).json()
    with Calls() as calls:
        answer = await api.http.get(f"/v1/batch/{batch['batch_id']}")
    assert answer.status_code == 200 and len(answer.json()["outputs"]) == 100
    assert calls.on_event_loop("json_in_pieces", "prompt_output") == [False, False]


async def test_a_large_batch_is_made_in_another_process_and_never_read_by_the_ingress(make_api: MakeApi) -> None:
    """Without a key file everybody may be interactive; asynchronous work is read apart nonetheless."""
    api = make_api(job_limits={"max_batch_lines": 1000})
    content = json.dumps({"prompts": ["the quick brown fox"] * 1000, "max_tokens": 3}).encode()
    async with asyncio.timeout(LIMIT_S):
        while not (new := [each for each in api.jobs.new.values() if each.lines._packed is not None]):
            # Until the process is ready threads do the work.
            assert await post(api, "/v1/batch/async", content, **{"idempotency-key": new_id("key")}) == 202
            await asyncio.sleep(0.1)
    assert new[0].body_digest is not None
    assert (len(new[0].lines), new[0].lines[999].body["prompt"]) == (1000, "the quick brown fox")


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
