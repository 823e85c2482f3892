"""Requests of mixed lengths that arrive over time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from replicas.protocol import Band

_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 259, 4000
_URGENT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Prompt with its arrival time and the number of its output tokens."""

    number: int
    arrival_s: float
    """Seconds after the start of the trace."""
    prompt: tuple[int, ...]
    num_output_tokens: int
    band: Band = Band.STANDARD

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.prompt) + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """Parameters of a reproducible trace."""

    num_requests: int = 48
    requests_per_s: float = 8.0
    """Rate of Poisson arrivals. It exceeds the engine's capacity, so that tokens/s measure the engine, not the load."""
    prompt_tokens: tuple[int, int] = (32, 256)
    output_tokens: tuple[int, int] = (16, 192)
    seed: int = 0


def make_trace(spec: TraceSpec) -> list[TraceRequest]:
    """Return requests in order of arrival, with lengths uniform between the bounds; one in ten is urgent."""
    rng = random.Random(spec.seed)
    requests, arrival_s = [], 0.0
    for number in range(spec.num_requests):
        prompt = tuple(rng.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(rng.randint(*spec.prompt_tokens)))
        band = Band.INTERACTIVE if rng.random() < _URGENT_SHARE else Band.STANDARD
        requests.append(TraceRequest(number, arrival_s, prompt, rng.randint(*spec.output_tokens), band))
        arrival_s += rng.expovariate(spec.requests_per_s)
    return requests
