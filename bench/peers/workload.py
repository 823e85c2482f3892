"""The workload of every engine: the same token ids and lengths in the same order."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_CONCURRENCY = 16
"""Sequences in an engine at once."""
_NUM_REQUESTS = 48
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 259, 8000


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One prompt of token ids, continued greedily to exactly `num_output_tokens`; end-of-sequence is ignored."""

    number: int
    prompt: tuple[int, ...]
    num_output_tokens: int


def mixed(num_requests: int = _NUM_REQUESTS, seed: int = 0, longest_output: int = 192) -> list[PeerRequest]:
    """Return requests with prompts of 32 to 256 tokens and outputs of 16 to `longest_output`, to be sent at once."""
    rng = random.Random(seed)
    lengths = [(rng.randint(32, 256), rng.randint(16, longest_output)) for _ in range(num_requests)]
    return [PeerRequest(number, _prompt(rng, prompt), output) for number, (prompt, output) in enumerate(lengths)]


def equal(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seed: int) -> list[PeerRequest]:
    """Return requests of one shape."""
    rng = random.Random(seed)
    return [PeerRequest(number, _prompt(rng, num_prompt_tokens), num_output_tokens) for number in range(num_requests)]


def _prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(num_tokens))
