"""Estimates of lines' sizes: expected tokens, length ranks and prefix keys."""

from typing import Any

import pytest

from serve_app.jobs.lifecycle.line_size import size_of


def test_sizes_give_the_length_rank_and_the_prefix_key():
    def chat(text: str, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": "s" * 300}, {"role": "user", "content": text}], **fields}

    path = "/v1/chat/completions"
    short, long = size_of(path, chat("x", max_tokens=10)), size_of(path, chat("y", max_completion_tokens=1000))
    assert long.length_rank < short.length_rank
    assert long.prefix_key == short.prefix_key
    a, b = (size_of("/v1/completions", {"prompt": prompt}) for prompt in "ab")
    assert a.prefix_key != b.prefix_key


@pytest.mark.parametrize(
    ("body", "expected_tokens"),
    [
        ({"prompt": "x" * 400, "max_tokens": 5, "n": 3}, 115),
        ({"prompt": [[1, 2, 3], [4]], "max_tokens": 5}, 14),
        ({"prompt": [1, 2, 3]}, 19),
        ({"prompt": "x", "max_tokens": 10**18}, 2**30),
        ({"input": "x" * 400, "max_output_tokens": 5}, 105),
        ({"input": [{"content": "x" * 399}, {"output": "x" * 400}], "instructions": "y" * 399}, 556),
    ],
    ids=["choices", "prompts of ids", "default limit", "huge", "text of a response", "items of a response"],
)
def test_sizes_count_prompts_choices_and_limits(body, expected_tokens):
    assert size_of("/v1/responses" if "input" in body else "/v1/completions", body).expected_tokens == expected_tokens


@pytest.mark.parametrize(
    ("endpoint", "body", "expected_tokens"),
    [
        ("/v1/embeddings", {"input": "x" * 400}, 100),
        ("/v1/embeddings", {"input": ["x" * 400, "y" * 40], "dimensions": 512}, 110),
        ("/v1/embeddings", {"input": [[1, 2, 3], [4]]}, 4),
        ("/v1/score", {"text_1": "x" * 400, "text_2": ["y" * 40] * 3}, 330),
        ("/v1/score", {"text_1": ["x" * 400, "x" * 40], "text_2": ["y" * 40] * 2}, 130),
        ("/v1/rerank", {"query": "x" * 400, "documents": ["y" * 40] * 3}, 330),
        ("/v1/rerank", {"query": "x" * 2**20, "documents": ["y"] * 2**13}, 2**30),
        ("/v1/rerank", {"documents": {"text": 5}}, 3),
    ],
)
def test_texts_that_are_pooled_have_no_output(endpoint, body, expected_tokens):
    assert size_of(endpoint, body).expected_tokens == expected_tokens
