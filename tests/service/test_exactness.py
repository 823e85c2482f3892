"""Responses over HTTP are the model's output, token for token, in every form of request."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from testkit.model.engine_runs import random_prompts, reference_model, reference_tokens
from tests.service.conftest import MODEL, Service

pytestmark = pytest.mark.rotated

NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
WITH_TOKENS = {"return_token_ids": True, "ignore_eos": True}
PROMPTS = [list(prompt) for prompt in random_prompts((1, 5, 17, 40, 90, 130), seed=3)]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return reference_model(checkpoint)


async def complete(service: Service, prompt: Any, **fields: Any) -> list[list[int]]:
    """Return each choice's token ids."""
    body = GREEDY | fields | {"extra_body": WITH_TOKENS | fields.get("extra_body", {})}
    answer = await service.openai.completions.create(model=MODEL, prompt=prompt, **body)
    return [choice.token_ids for choice in answer.choices]


async def stream(service: Service, prompt: Any, **fields: Any) -> list[int]:
    """Return the streamed token ids of one choice."""
    body = GREEDY | fields | {"extra_body": WITH_TOKENS, "stream": True}
    token_ids: list[int] = []
    async for chunk in await service.openai.completions.create(model=MODEL, prompt=prompt, **body):
        for choice in chunk.choices:
            token_ids += choice.token_ids or []
    return token_ids


async def test_batch_equals_each_alone_equals_generate(service: Service, reference: PreTrainedModel) -> None:
    expected = reference_tokens(reference, map(tuple, PROMPTS), NUM_TOKENS)
    assert any(len(set(tokens)) > 5 for tokens in expected), "the model must say something to compare"
    assert await complete(service, PROMPTS) == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert await complete(service, prompt) == [tokens]


async def test_streams_beside_one_another_equal_generate(service: Service, reference: PreTrainedModel) -> None:
    expected = reference_tokens(reference, map(tuple, PROMPTS), NUM_TOKENS)
    assert await asyncio.gather(*(stream(service, prompt) for prompt in PROMPTS)) == expected


async def test_prefix_hit_equals_cold_and_is_accounted(service: Service) -> None:
    request = {"model": MODEL, "prompt": PROMPTS[5], "max_tokens": NUM_TOKENS, "temperature": 0}
    cold = (await service.http.post("/v1/completions", json=request)).json()
    warm = (await service.http.post("/v1/completions", json=request)).json()
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


async def test_seeded_samples_are_equal_alone_streamed_and_batched(service: Service) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    (alone,) = await complete(service, PROMPTS[3], **sampling)
    async with asyncio.TaskGroup() as group:
        for index, prompt in enumerate(PROMPTS):
            group.create_task(stream(service, prompt, temperature=0.7, seed=index))
        streaming = group.create_task(stream(service, PROMPTS[3], **sampling))
        sampling_three = group.create_task(complete(service, PROMPTS[3], n=3, **sampling))
    streamed, beside = streaming.result(), sampling_three.result()
    assert streamed == alone == beside[0]
    assert len({tuple(tokens) for tokens in beside}) == 3
    (second,) = await complete(service, PROMPTS[3], **{**sampling, "seed": 12})
    assert beside[1] == second, "sample i has the seed + i"


async def test_urgent_requests_that_preempt_change_no_token(service: Service, reference: PreTrainedModel) -> None:
    prompts = random_prompts([30] * 20, seed=5)
    expected = reference_tokens(reference, prompts, 100)
    background = [
        asyncio.create_task(complete(service, list(prompt), max_tokens=100, extra_body={"priority": 2}))
        for prompt in prompts
    ]
    while service.engine.stats().num_running < 16:
        await asyncio.sleep(0.001)
    urgent = await asyncio.gather(
        *(complete(service, list(prompt), max_tokens=8, extra_body={"priority": 0}) for prompt in prompts[:8])
    )
    assert [tokens for (tokens,) in urgent] == [tokens[:8] for tokens in expected[:8]]
    assert [tokens for (tokens,) in await asyncio.gather(*background)] == expected
    counters = {metric.name: metric.value for metric in service.engine.metrics().metrics}
    assert counters["vllm:num_preemptions"] > 0


TINY = (1e-300, 5e-324, 1e-46, 1e-38)
"""Numbers that are 0, or of few digits, in float32."""
EDGES: list[dict[str, Any]] = [
    *({name: value} for name in ("temperature", "min_p", "top_p", "presence_penalty") for value in TINY),
    *({"logit_bias": {"5": value}} for value in (*TINY, 100, -100)),
    {"top_p": 1 - 1e-16, "min_p": 1 - 1e-16},
    {"temperature": 1e-5, "logit_bias": {"5": 100}, "repetition_penalty": 0.01, "frequency_penalty": -2},
    {"temperature": 1e-5, "repetition_penalty": 100, "min_p": 1e-300, "top_p": 1e-300},
]


async def test_numbers_at_the_ends_of_their_ranges_overflow_nothing(service: Service) -> None:
    request = {"model": MODEL, "prompt": [5, 5, 7], "max_tokens": 4, "ignore_eos": True, "seed": 1, "logprobs": 3}
    for edge in EDGES:
        answer = await service.http.post("/v1/completions", json=request | edge)
        assert answer.status_code == 200, (edge, answer.text)
    for tiny in TINY:
        refused = await service.http.post("/v1/completions", json=request | {"repetition_penalty": tiny})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "repetition_penalty")
