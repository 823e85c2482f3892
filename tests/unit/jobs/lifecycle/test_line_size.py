"""Estimates of lines' sizes: expected tokens, length ranks and prefix keys."""

from typing import Any

import pytest

from serve_app.jobs.lifecycle.line_size import size_of


def test_sizes_give_the_length_rank_and_the_prefix_key():
    def chat(text: str, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": "s" * 300}, {"role": "user", "content": text}], **fields}

    short, long = size_of(chat("x", max_tokens=10)), size_of(chat("y", max_completion_tokens=1000))
    assert long.length_rank < short.length_rank
    assert long.prefix_key == short.prefix_key
    assert size_of({"prompt": "a"}).prefix_key != size_of({"prompt": "b"}).prefix_key


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
    assert size_of(body).expected_tokens == expected_tokens
