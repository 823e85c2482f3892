"""Large requests leave the event loop to the others."""

import asyncio
import gc
import json
import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from serve_app.openai.request.parsing import parse_json
from serve_app.openai.request.schema import ChatBody, CompletionBody, DetokenizeBody
from testkit.http.api import MODEL, Api, MakeApi, card_of

MANY = 300_000


async def worst_share(api: Api, path: str, body: dict[str, Any]) -> float:
    """Return the longest standstill of the event loop while a request is answered, as a share of the whole.

    In processor seconds of this process: time that other processes take is no standstill.
    """
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    begun_s = last_s = time.process_time()
    answer = asyncio.create_task(api.http.post(path, content=content, headers=headers))
    worst_s = 0.0
    while not answer.done():
        await asyncio.sleep(0.001)
        now_s = time.process_time()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    assert answer.result().status_code == 200
    return worst_s / (last_s - begun_s)


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
    assert await worst_share(api, path, body) < 0.5


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
