"""Requests of mixed lengths that arrive over time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from replicas.protocol import Band

_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 259, 4000
_URGENT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt, how many tokens its answer has, and when it comes."""

    number: int
    arrival_s: float
    """Seconds after the trace begins."""
    prompt: tuple[int, ...]
    num_output_tokens: int
    band: Band = Band.STANDARD

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt) + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """A trace, reproducible."""

    num_requests: int = 48
    requests_per_s: float = 8.0
    """Poisson arrivals. More than the engine can do, so that tokens a second are its own and not the load's."""
    prompt_tokens: tuple[int, int] = (32, 256)
    output_tokens: tuple[int, int] = (16, 192)
    seed: int = 0


def make_trace(spec: TraceSpec) -> list[TraceRequest]:
    """Lengths uniform between the bounds; one request in ten is urgent; in order of arrival."""
    rng = random.Random(spec.seed)
    requests, arrival_s = [], 0.0
    for number in range(spec.num_requests):
        prompt = tuple(rng.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(rng.randint(*spec.prompt_tokens)))
        band = Band.INTERACTIVE if rng.random() < _URGENT_SHARE else Band.STANDARD
        requests.append(TraceRequest(number, arrival_s, prompt, rng.randint(*spec.output_tokens), band))
        arrival_s += rng.expovariate(spec.requests_per_s)
    return requests
