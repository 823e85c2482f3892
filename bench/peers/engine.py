"""Interface between the driver and an engine: the requests of every engine, and the figures of what it has done."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from bench.record import percentile

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


class Events(NamedTuple):
    """Arrival times of the output tokens, in seconds of `time.perf_counter`."""

    token_s: dict[int, list[float]]
    """Arrival time of each token, by request number. Tokens that came together have the same time."""
    started_s: float
    ended_s: float


class PeerEngine(Protocol):
    """Engine with a model loaded, by default in this process."""

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Give the engine all `requests` at once, of which it runs at most `concurrency` together; wait for the end."""
        ...

    def pids(self) -> list[int]:
        """Return the processes whose memory and CPU time count as the engine's."""
        return [os.getpid()]

    def close(self) -> None:
        """Stop the engine and its processes, if it has any of its own."""
        return


EngineFactory = Callable[[argparse.Namespace], PeerEngine]
"""Factory that loads `model` in `dtype` with `threads`; other arguments are specific to the engine."""


def mixed_requests(
    num_requests: int = _NUM_REQUESTS, seed: int = 0, longest_output: int = 192, longest_prompt: int = 256
) -> list[PeerRequest]:
    """Return requests with prompts of at least 32 tokens and outputs of at least 16, to be sent at once."""
    rng = random.Random(seed)
    lengths = [(rng.randint(32, longest_prompt), rng.randint(16, longest_output)) for _ in range(num_requests)]
    return [PeerRequest(number, _prompt(rng, prompt), output) for number, (prompt, output) in enumerate(lengths)]


def equal_requests(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seed: int) -> list[PeerRequest]:
    """Return requests of one shape."""
    rng = random.Random(seed)
    return [PeerRequest(number, _prompt(rng, num_prompt_tokens), num_output_tokens) for number in range(num_requests)]


def _prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(num_tokens))


def summary(events: Events) -> dict[str, Any]:
    """Return tokens/s and, in milliseconds, TTFT, inter-token gaps and each request's mean time per token."""
    moments = [times for times in events.token_s.values() if times]
    num_tokens = sum(len(times) for times in moments)
    duration_s = events.ended_s - events.started_s
    return {
        "out_tokens": num_tokens,
        "wall_s": round(duration_s, 2),
        "tok_s": round(num_tokens / duration_s, 2),
        "ttft_ms": _distribution_ms([times[0] - events.started_s for times in moments]),
        "itl_ms": _distribution_ms([b - a for times in moments for a, b in itertools.pairwise(times)]),
        "tpot_ms": _distribution_ms([(t[-1] - t[0]) / (len(t) - 1) for t in moments if len(t) > 1]),
    }


def decode_step_ms(events: Events) -> float | None:
    """Return the mean time of a step in which all sequences decode; None without such a step."""
    begins_s = max(times[0] for times in events.token_s.values())
    ends_s = min(times[-1] for times in events.token_s.values())
    first = next(iter(events.token_s.values()))
    inside = sorted(moment for moment in first if begins_s <= moment <= ends_s)
    return (inside[-1] - inside[0]) / (len(inside) - 1) * 1e3 if len(inside) > 1 else None


def _distribution_ms(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    milliseconds = [value * 1e3 for value in seconds]
    return {
        "mean": round(statistics.fmean(milliseconds), 2),
        "p50": round(percentile(milliseconds, 50), 2),
        "p99": round(percentile(milliseconds, 99), 2),
    }
