"""Tokens that the tokenizer knows and the model does not are refused by name, wherever a request has them."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from testkit.http.api import MODEL, Api, MakeApi, card_of


@pytest.fixture
def unknown(tokenizer: PreTrainedTokenizerFast) -> tuple[int, str]:
    """Return the tokenizer's last token and its text; the model has one token less."""
    token_id = len(tokenizer) - 1
    text = tokenizer.decode([token_id])
    assert token_id in tokenizer.encode(text, add_special_tokens=False)
    return token_id, text


@pytest.fixture
def api(make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, unknown: tuple[int, str]) -> Api:
    return make_api(dispatcher={"card": replace(card_of(tokenizer), vocab_size=unknown[0])})


def check(response: httpx.Response, param: str, token_id: int) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert f"id {token_id})" in error["message"] and f"{token_id} tokens" in error["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_texts_are_refused(api: Api, unknown: tuple[int, str], is_streamed: bool) -> None:
    token_id, text = unknown
    messages = [{"role": "user", "content": f"a {text}"}]
    check(await api.complete(prompt=text, stream=is_streamed), "prompt", token_id)
    check(await api.complete(prompt=["a", text], stream=is_streamed), "prompt", token_id)
    check(await api.post("/v1/chat/completions", {"model": MODEL, "messages": messages}), "messages", token_id)
    check(await api.complete(prompt="a", bad_words=[text]), "bad_words", token_id)
    assert not api.replica.started
    assert (await api.complete(prompt="a", max_tokens=2)).is_success


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", lambda token_id: [0, token_id]),
        ("prompt", lambda token_id: [[0], [token_id]]),
        ("stop_token_ids", lambda token_id: [token_id]),
        ("allowed_token_ids", lambda token_id: [0, token_id]),
        ("logit_bias", lambda token_id: {str(token_id): 1.0}),
    ],
)
async def test_ids_are_refused(api: Api, unknown: tuple[int, str], field: str, value: Any) -> None:
    token_id, _ = unknown
    check(await api.complete(**{"prompt": "a", field: value(token_id)}), field, token_id)
    assert not api.replica.started


async def test_a_line_of_a_prompt_batch_fails_alone(api: Api, unknown: tuple[int, str]) -> None:
    batch = (await api.post("/v1/batch/sync", {"prompts": ["a", unknown[1]], "max_tokens": 2})).json()
    assert [output["status"] for output in batch["outputs"]] == ["completed", "failed"]
    assert f"id {unknown[0]})" in batch["outputs"][1]["error"]["message"]
