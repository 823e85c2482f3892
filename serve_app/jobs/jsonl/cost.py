"""How long a line will probably be and how its prompt begins, which decides the order in which lines run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2s

_CHARS_PER_TOKEN = 4
_PREFIX_CHARS = 256
"""Prompts that share so much, some blocks of KV cache, are worth running one after the other."""
_CHAT_OUTPUT_TOKENS = 256
"""What an answer without a limit is taken to need."""
_COMPLETION_OUTPUT_TOKENS = 16
"""The API's own default."""
_MAX_EXPECTED_TOKENS = 2**30


@dataclass(frozen=True, slots=True)
class LineSize:
    """What is known of a line before it is tokenized."""

    expected_tokens: int
    """Prompt and output, all choices together."""
    length_rank: int
    """The less, the longer; lines of one rank differ in length by less than a factor of two."""
    prefix_key: str
    """The same for prompts that begin alike."""


def size_of(body: Mapping[str, object]) -> LineSize:
    """The size of a request, whatever its body may be: a bad one is told so when it runs."""
    num_prompts, num_prompt_tokens, beginning = _prompt_of(body)
    num_choices = _number(body.get("n"), 1)
    default = _CHAT_OUTPUT_TOKENS if "messages" in body else _COMPLETION_OUTPUT_TOKENS
    max_tokens = _number(body.get("max_completion_tokens"), _number(body.get("max_tokens"), default))
    expected = min(_MAX_EXPECTED_TOKENS, max(1, num_prompt_tokens + num_prompts * num_choices * max_tokens))
    return LineSize(
        expected, -expected.bit_length(), blake2s(beginning.encode(errors="replace"), digest_size=8).hexdigest()
    )


def _prompt_of(body: Mapping[str, object]) -> tuple[int, int, str]:
    """Number of prompts, their tokens in all, and how the first one begins."""
    messages = body.get("messages")
    if isinstance(messages, list):
        text = "\n".join(_text_of(message.get("content")) for message in messages if isinstance(message, dict))
        return 1, len(text) // _CHARS_PER_TOKEN, text[:_PREFIX_CHARS]
    prompt = body.get("prompt")
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
