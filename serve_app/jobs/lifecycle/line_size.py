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


def sized(new_lines: Iterable[NewLine]) -> Iterator[tuple[NewLine, LineSize]]:
    """Yield each line with the estimate of its size, for `storage.lines.new_rows`."""
    return ((line, size_of(line.body)) for line in new_lines)


def size_of(body: Mapping[str, object]) -> LineSize:
    """Estimate the size of a request. Any body is accepted: an invalid one fails when its line runs."""
    num_prompts, num_prompt_tokens, beginning = _prompt_of(body)
    num_choices = _number(body.get("n"), 1)
    max_tokens = _CHAT_OUTPUT_TOKENS if "messages" in body or "input" in body else _COMPLETION_OUTPUT_TOKENS
    for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
        max_tokens = _number(body.get(name), max_tokens)
    expected = min(_MAX_EXPECTED_TOKENS, max(1, num_prompt_tokens + num_prompts * num_choices * max_tokens))
    return LineSize(
        expected, -expected.bit_length(), blake2s(beginning.encode(errors="replace"), digest_size=8).hexdigest()
    )


def _prompt_of(body: Mapping[str, object]) -> tuple[int, int, str]:
    """Return the number of prompts, their tokens in total, and the beginning of the first one."""
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list):
        instructions = [body[name] for name in ("system", "instructions") if name in body]
        contents = [turn.get("content", turn.get("output")) for turn in turns if isinstance(turn, dict)]
        text = "\n".join(map(_text_of, [*instructions, *contents]))
        return 1, len(text) // _CHARS_PER_TOKEN, text[:_PREFIX_CHARS]
    prompt = body.get("prompt", turns)
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    num_tokens = sum(len(one) if isinstance(one, list) else len(str(one)) // _CHARS_PER_TOKEN for one in prompts)
    first = prompts[0][:_PREFIX_CHARS] if isinstance(prompts[0], str | list) else ""
    return len(prompts), num_tokens, str(first)


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _number(value: object, default: int) -> int:
    return min(max(value, 0), _MAX_EXPECTED_TOKENS) if isinstance(value, int) else default
