"""Estimates of new lines' sizes, made before the lines are tokenized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2s

from serve_app.jobs.api.new_lines import NewLine
from serve_app.jobs.storage.lines import LineSize

_CHARS_PER_TOKEN = 4
_PREFIX_CHARS = 256
"""Characters of a prompt in its prefix key: some blocks of KV cache. Prompts with the same key run in sequence."""
_CHAT_OUTPUT_TOKENS = 256
"""Expected output of a chat request without a limit."""
_COMPLETION_OUTPUT_TOKENS = 16
"""Expected output of a completion without a limit: the API's default limit."""
_MAX_EXPECTED_TOKENS = 2**30
_POOLED = {
    "/v1/embeddings": ("input",), "/v1/score": ("text_2", "text_1"), "/v1/rerank": ("documents", "query"),
}  # fmt: skip
"""Fields with the texts of the endpoints without output tokens, and with their queries."""


def sized(endpoint: str, new_lines: Iterable[NewLine]) -> Iterator[tuple[NewLine, LineSize]]:
    """Yield each line for `endpoint` with the estimate of its size, for `storage.lines.new_rows`."""
    return ((line, size_of(endpoint, line.body)) for line in new_lines)


def size_of(endpoint: str, body: Mapping[str, object]) -> LineSize:
    """Estimate the size of a request to `endpoint`.

    Any body is accepted: an invalid one fails when its line runs.
    """
    num_tokens, beginning = _pooled(body, *_POOLED[endpoint]) if endpoint in _POOLED else _generated(body)
    expected = min(_MAX_EXPECTED_TOKENS, max(1, num_tokens))
    return LineSize(
        expected, -expected.bit_length(), blake2s(beginning.encode(errors="replace"), digest_size=8).hexdigest()
    )


def _generated(body: Mapping[str, object]) -> tuple[int, str]:
    """Return the tokens of prompts and outputs, and the beginning of the first prompt."""
    num_prompts, num_prompt_tokens, beginning = _prompt_of(body)
    num_choices = _number(body.get("n"), 1)
    max_tokens = _CHAT_OUTPUT_TOKENS if "messages" in body or "input" in body else _COMPLETION_OUTPUT_TOKENS
    for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
        max_tokens = _number(body.get(name), max_tokens)
    return num_prompt_tokens + num_prompts * num_choices * max_tokens, beginning


def _pooled(body: Mapping[str, object], texts_field: str, queries_field: str | None = None) -> tuple[int, str]:
    """Return the tokens of texts, each behind its query, and the beginning of the first one; one query is for all."""
    texts = _texts_of(body.get(texts_field))
    num_tokens, beginning = _size_of_texts(texts)
    if queries_field is None:
        return num_tokens, beginning
    queries = _texts_of(body.get(queries_field))
    num_query_tokens, beginning = _size_of_texts(queries)
    return num_tokens + num_query_tokens * (len(texts) if len(queries) == 1 else 1), beginning


def _prompt_of(body: Mapping[str, object]) -> tuple[int, int, str]:
    """Return the number of prompts, their tokens in total, and the beginning of the first one."""
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list):
        instructions = [body[name] for name in ("system", "instructions") if name in body]
        contents = [turn.get("content", turn.get("output")) for turn in turns if isinstance(turn, dict)]
        text = "\n".join(map(_text_of, [*instructions, *contents]))
        return 1, len(text) // _CHARS_PER_TOKEN, text[:_PREFIX_CHARS]
    prompts = _texts_of(body.get("prompt", turns))
    return len(prompts), *_size_of_texts(prompts)


def _texts_of(value: object) -> list[object]:
    """Return the texts in a text, a list, token ids, or lists of token ids."""
    return value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]


def _size_of_texts(texts: list[object]) -> tuple[int, str]:
    """Return the tokens of texts in total, and the beginning of the first one."""
    num_tokens = sum(len(text) if isinstance(text, list) else len(str(text)) // _CHARS_PER_TOKEN for text in texts)
    first = texts[0][:_PREFIX_CHARS] if isinstance(texts[0], str | list) else ""
    return num_tokens, str(first)


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _number(value: object, default: int) -> int:
    return min(max(value, 0), _MAX_EXPECTED_TOKENS) if isinstance(value, int) else default
