"""Text completions: forms of prompts, echo, logprobs, defaults."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from testkit.http.api import MODEL, REPLY, Api, MakeApi, events, refusal
from testkit.http.scripted_dispatcher import ScriptedToken


async def test_stock_client_gets_a_whole_answer(make_api: MakeApi, script: list[ScriptedToken]) -> None:
    api = make_api(stops_at=len(script))
    answer = await api.openai.completions.create(model=MODEL, prompt="the quick", max_tokens=60)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY, "stop")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


async def test_default_is_sixteen_tokens_or_the_room_there_is(api: Api) -> None:
    assert (await api.complete()).json()["usage"]["completion_tokens"] == 16
    assert (await api.complete(prompt=[1] * 250)).json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("the quick", 1), (["the quick", "hello"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
async def test_four_forms_of_prompt(api: Api, prompt: Any, num_prompts: int) -> None:
    answer = await api.openai.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    prompts = [request.prompt_token_ids for request in api.replica.started]
    assert prompts[::2] == prompts[1::2]
    num_tokens = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert num_tokens == (sum(map(len, prompts[::2])), 6 * num_prompts)


async def test_same_prompt_twice_is_sampled_twice(api: Api) -> None:
    await api.complete(prompt=["a", "a"])
    await api.complete(prompt=["a", "a"], seed=7)
    one, other, *given = [request.params.seed for request in api.replica.started]
    assert one != other and given == [7, 7]


@pytest.mark.parametrize("tokens_per_delta", [1, 4])
@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_and_whole_say_the_same(make_api: MakeApi, tokens_per_delta: int, echo: bool) -> None:
    api = make_api(tokens_per_delta=tokens_per_delta)
    fields = {"prompt": ["the quick", "höw"], "n": 2, "logprobs": 2, "echo": echo, "return_token_ids": True}
    whole = (await api.complete(**fields)).json()["choices"]
    assert [choice.pop("prompt_logprobs") for choice in whole] == [None] * 4
    streamed: list[dict[str, Any]] = [{} for _ in whole]
    for item in events((await api.complete(stream=True, **fields)).text)[:-1]:
        choice = json.loads(item)["choices"][0]
        so_far = streamed[choice["index"]]
        if not so_far:
            so_far.update(choice)
            continue
        so_far["text"] += choice["text"]
        so_far["token_ids"] += choice["token_ids"]
        for name, values in choice["logprobs"].items():
            so_far["logprobs"][name] += values
        so_far |= {key: choice[key] for key in ("finish_reason", "stop_reason") if key in choice}
    assert streamed == whole


async def test_echo_scores_the_prompt(api: Api) -> None:
    choice = (await api.complete(prompt="the quick", echo=True, logprobs=1, max_tokens=2)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"]) == "the quickhello "
    first, *others = logprobs["token_logprobs"]
    assert first is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in others)
    assert [choice["text"][offset] for offset in logprobs["text_offset"]] == [token[0] for token in logprobs["tokens"]]


async def test_offsets_count_special_tokens_that_the_prompt_spells(api: Api) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1}
    spelled = (await api.complete(prompt="<|end|>the quick", **fields)).json()["choices"][0]
    offsets = spelled["logprobs"]["text_offset"]
    assert offsets[:2] == [0, len("<|end|>")]
    assert [spelled["text"][at:][: len(t)] for at, t in zip(offsets, spelled["logprobs"]["tokens"], strict=True)] == (
        spelled["logprobs"]["tokens"]
    )


async def test_echo_is_the_same_for_a_text_and_its_token_ids(api: Api, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<|end|>the quick"
    token_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1}
    of_text, of_ids = [(await api.complete(prompt=prompt, **fields)).json()["choices"] for prompt in (text, token_ids)]
    assert of_text == of_ids


async def test_echo_alone_generates_nothing(api: Api) -> None:
    reply = (await api.complete(prompt="the quick", echo=True, max_tokens=0, logprobs=0)).json()
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the quick", "length")
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == 0


async def test_echo_without_logprobs_shows_none(api: Api) -> None:
    for max_tokens in (0, 1):
        assert (await api.complete(echo=True, max_tokens=max_tokens)).json()["choices"][0]["logprobs"] is None
    assert api.replica.started[-1].params.prompt_logprobs is None


async def test_echo_of_token_ids_shows_their_text(api: Api, tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = tokenizer.backend_tokenizer.encode("how are you").ids
    choice = (await api.complete(prompt=token_ids, echo=True, max_tokens=1)).json()["choices"][0]
    assert choice["text"] == "how are youhello"


async def test_offsets_count_characters_not_bytes(make_api: MakeApi, script: list[ScriptedToken]) -> None:
    api = make_api(stops_at=len(script))
    choice = (await api.complete(logprobs=0, max_tokens=100)).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    last_word = offsets[choice["logprobs"]["tokens"].index(" today")]
    assert choice["text"][last_word:].startswith(" today")


async def test_chosen_token_is_always_among_the_top(api: Api) -> None:
    logprobs = (await api.complete(logprobs=0, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


async def test_chosen_token_is_the_first_of_the_top(api: Api) -> None:
    logprobs = (await api.complete(logprobs=3, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert [next(iter(top)) for top in logprobs["top_logprobs"]] == logprobs["tokens"]


async def test_token_ids_come_back(api: Api) -> None:
    choice = (await api.complete(prompt=[5, 6], return_token_ids=True, max_tokens=2)).json()["choices"][0]
    token_ids = [token.token_id for token in api.replica.script[:2]]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], token_ids)


async def test_best_of_is_refused_by_name_unless_it_is_n(api: Api) -> None:
    for accepted in ({"best_of": 1}, {"best_of": 2, "n": 2}):
        assert (await api.complete(**accepted)).status_code == 200
    response = await api.complete(best_of=3)
    assert refusal(response) == (400, "unsupported_parameter", "best_of")
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_sampling_fields_reach_the_engine(api: Api) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logit_bias": {"5": -100, "6": 1.5},
        "max_tokens": 9,
        "seed": -5,
    }
    await api.complete(**fields)
    params = api.replica.started[0].params
    assert {str(bias.token_id): bias.bias for bias in params.logit_bias} == fields.pop("logit_bias")
    for name, value in fields.items():
        given = getattr(params, name)
        assert (list(given) if isinstance(given, tuple) else given) == value, name


@pytest.mark.parametrize("top_k", [0, -1, None])
async def test_top_k_can_be_off(api: Api, top_k: int | None) -> None:
    await api.complete(top_k=top_k)
    assert api.replica.started[0].params.top_k is None


async def test_null_means_not_given(api: Api) -> None:
    nulls = dict.fromkeys(["max_tokens", "temperature", "stop", "stream", "n", "seed", "logprobs", "user", "suffix"])
    assert (await api.complete(**nulls)).json()["usage"]["completion_tokens"] == 16
