"""Chat completions, whole and streamed, as the stock client sees them."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from testkit.http.api import MODEL, REPLY, Api, MakeApi, events, refusal
from testkit.http.scripted_dispatcher import ScriptedToken

HELLO = [{"role": "user", "content": "hello"}]


async def test_stock_client_gets_a_whole_answer(make_api: MakeApi, script: list[ScriptedToken]) -> None:
    api = make_api(stops_at=len(script), cached_tokens=4)
    answer = await api.openai.chat.completions.create(model=MODEL, messages=HELLO)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint is not None
    assert (answer.object, answer.model, answer.service_tier) == ("chat.completion", MODEL, "default")
    num_prompt_tokens = len(api.replica.started[0].prompt_token_ids)
    assert answer.usage.to_dict() == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(script),
        "total_tokens": num_prompt_tokens + len(script),
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_stream_has_role_first_then_reason_then_usage(api: Api) -> None:
    response = await api.chat(stream=True, stream_options={"include_usage": True}, max_tokens=3)
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = events(response.text)
    assert done == "[DONE]"
    chunks = [json.loads(item) for item in data]
    *spoken, usage = chunks
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", usage["id"])}
    assert spoken[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in spoken] == [None] * (len(spoken) - 1) + ["length"]
    assert spoken[-1]["choices"][0]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in spoken)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


async def test_stream_has_no_usage_unless_asked(api: Api) -> None:
    assert "usage" not in (await api.chat(stream=True, max_tokens=3)).text


async def test_continuous_usage_needs_include_usage(api: Api) -> None:
    response = await api.chat(stream=True, stream_options={"continuous_usage_stats": True}, max_tokens=3)
    assert "usage" not in response.text


async def test_fields_of_vllm_are_null_unless_asked(api: Api) -> None:
    chat = (await api.chat(max_tokens=2)).json()
    assert (chat["prompt_token_ids"], chat["prompt_logprobs"], chat["choices"][0]["token_ids"]) == (None, None, None)
    [text] = (await api.complete(max_tokens=2)).json()["choices"]
    assert (text["prompt_token_ids"], text["prompt_logprobs"], text["token_ids"]) == (None, None, None)


async def test_continuous_usage_counts_up(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await api.chat(stream=True, stream_options=options, max_tokens=3)
    counts = [json.loads(item)["usage"]["completion_tokens"] for item in events(response.text)[:-1]]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, 3)


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_streamed_and_whole_say_the_same(make_api: MakeApi, tokens_per_delta: int) -> None:
    api = make_api(tokens_per_delta=tokens_per_delta)
    options = {"max_tokens": 20, "n": 2, "logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
    whole = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, **options)
    texts = ["", ""]
    positions: list[list[Any]] = [[], []]
    token_ids: list[list[int]] = [[], []]
    stream = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **options)
    prompts = []
    async for chunk in stream:
        prompts += [chunk.model_extra["prompt_token_ids"]] if "prompt_token_ids" in chunk.model_extra else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            token_ids[choice.index] += choice.model_extra.get("token_ids", [])
            if choice.logprobs is not None:
                positions[choice.index] += choice.logprobs.content
    assert prompts == [whole.model_extra["prompt_token_ids"]]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert positions[choice.index] == choice.logprobs.content
        assert token_ids[choice.index] == choice.model_extra["token_ids"]


async def test_only_a_streamed_request_wants_its_deltas_at_once(api: Api) -> None:
    for is_streamed in (True, False):
        assert (await api.chat(stream=is_streamed)).status_code == 200
        assert (api.replica.started[-1].delta_interval_s is None) is is_streamed


async def test_choices_stream_interleaved(api: Api) -> None:
    response = await api.chat(stream=True, n=3, max_tokens=4)
    indices = [json.loads(item)["choices"][0]["index"] for item in events(response.text)[:-1]]
    assert set(indices) == {0, 1, 2} and indices != sorted(indices)


async def test_half_characters_have_bytes_and_a_spelling(api: Api) -> None:
    answer = await api.openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == answer.choices[0].message.content
    assert any(token.token.startswith("bytes:\\x") for token in tokens)
    assert all(len(token.top_logprobs) == 3 for token in tokens)


async def test_logprobs_without_top_list_only_the_chosen(api: Api) -> None:
    answer = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert [(token.logprob, token.top_logprobs) for token in content] == [(-0.5, []), (-1.5, [])]


async def test_samples_have_seeds_of_their_own_on_one_prompt(api: Api) -> None:
    await api.chat(n=3, seed=2**63 - 2, max_tokens=2)
    assert [request.params.seed for request in api.replica.started] == [2**63 - 2, 2**63 - 1, -(2**63)]
    names, indices = zip(*(request.request_id.rsplit("-", 1) for request in api.replica.started), strict=True)
    assert len(set(names)) == 1 and indices == ("0", "1", "2")


async def test_seeds_are_drawn_where_none_is_given(api: Api) -> None:
    await api.chat(n=3, max_tokens=2)
    assert len({request.params.seed for request in api.replica.started}) == 3


async def test_default_is_the_rest_of_the_context(api: Api) -> None:
    await api.chat(stream=True)
    assert api.replica.started[0].max_total_tokens == 256


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_work(api: Api, field: str) -> None:
    assert (await api.chat(**{field: 5})).json()["usage"]["completion_tokens"] == 5


async def test_both_names_must_agree(api: Api) -> None:
    assert (await api.chat(max_tokens=5, max_completion_tokens=5)).status_code == 200
    response = await api.chat(max_tokens=5, max_completion_tokens=6)
    assert refusal(response) == (400, "invalid_value", "max_completion_tokens")


async def test_template_shapes_the_prompt(api: Api, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "or not"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "go"},
    ]
    await api.chat(messages=messages, max_tokens=2)
    assert tokenizer.backend_tokenizer.decode(list(api.replica.started[0].prompt_token_ids)) == (
        "<|system|>be brief\n<|system|>or not\n<|user|>one\ntwo\n<|assistant|>yes\n<|user|>go\n<|assistant|>"
    )


async def test_a_message_that_the_template_leaves_out_is_written_in_another_form(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    template = (
        "{% if messages[0].role != 'system' %}Made by developers. {% endif %}{% for m in messages %}"
        "{% if m.role in ('user', 'assistant') or (m.role == 'system' and loop.first) %}<|{{ m.role }}|>{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template)
    other.save_pretrained(tmp_path)
    api = make_api(settings={"model": str(tmp_path)})
    first = {"role": "developer", "content": "in French"}
    later = [*HELLO, {"role": "assistant", "content": "yes"}, first, *HELLO]
    prompts = {
        "<|system|>in French<|user|>hello": [first, *HELLO],
        "<|user|>hello<|assistant|>yes<|user|>in French<|user|>hello": later,
    }
    for prompt, messages in prompts.items():
        answer = await api.post("/tokenize", {"messages": messages})
        assert other.decode(answer.json()["tokens"]).removeprefix("Made by developers. ") == prompt


async def test_reply_can_be_sent_back_as_history(api: Api) -> None:
    answer = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    history = [*HELLO, answer.choices[0].message.model_dump(), *HELLO]
    assert (await api.chat(messages=history, max_tokens=4)).status_code == 200


async def test_additions_of_sdks_are_accepted_and_not_rendered(api: Api) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"role": "assistant", "content": "{}", "tool_calls": [call]}
    added = reply | {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}}
    added["tool_calls"] = [call | {"function": call["function"] | {"parsed_arguments": {"b": [2]}}}]  # type: ignore[operator]
    for message in (reply, added):
        response = await api.chat(messages=[*HELLO, message, *HELLO], max_tokens=2)
        assert response.status_code == 200, response.text
    plain, with_additions = (request.prompt_token_ids for request in api.replica.started)
    assert plain == with_additions


async def test_template_may_refuse_messages(api: Api) -> None:
    response = await api.chat(messages=[{"role": "assistant", "content": "me first"}])
    assert response.status_code == 400
    assert "the user speaks first" in response.json()["error"]["message"]


async def test_model_without_template_is_named(
    make_api: MakeApi, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("plain")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(directory)
    api = make_api(settings={"model": str(directory)})
    response = await api.chat()
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    assert (await api.complete()).status_code == 200


async def test_refusal_reaches_the_stock_client_as_its_own_exception(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.openai.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.code == "model_not_found"
