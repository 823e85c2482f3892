"""Settings of the OpenAI layer."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.settings import check_bounds, setting


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one HTTP request."""

    max_prompts: int = setting(128, ge=1)
    """Most prompts in one completions request."""
    max_choices: int = setting(128, ge=1)
    """Most choices in one request: `n` times the number of prompts."""
    max_logprobs: int = setting(20, ge=0)
    """Most alternatives per position (`logprobs`, `top_logprobs`) that a request may ask for."""

    def __post_init__(self) -> None:
        check_bounds(self)
