"""The stock client against the real engine."""

from __future__ import annotations

import openai
import pytest

from tests.service.conftest import MODEL, Service


async def test_the_model_is_listed(service: Service) -> None:
    assert [model.id async for model in service.openai.models.list()] == [MODEL]


async def test_a_completion_of_several_prompts_and_choices(service: Service) -> None:
    reply = await service.openai.completions.create(
        model=MODEL, prompt=["the quick", "brown fox"], n=3, max_tokens=5, seed=7, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage is not None and reply.usage.completion_tokens == 30


async def test_choices_of_a_streamed_chat_run_side_by_side(service: Service) -> None:
    texts = [""] * 4
    async for chunk in await service.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "the quick brown fox"}], n=4, max_tokens=12,
        temperature=1.0, seed=3, stream=True, extra_body={"ignore_eos": True},
    ):  # fmt: skip
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert len(set(texts)) == 4


async def test_an_unknown_model_is_a_404(service: Service) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await service.openai.completions.create(model="another", prompt="x")
    assert caught.value.code == "model_not_found"
