"""Arrivals for the simulator: a load that is made up, or a trace that was recorded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from pydantic import Field

from bench.routing.streams import cumulative_zipf
from replicas.protocol import Band, GenerateRequest, SamplingParams
from serve_app.benchmark.trace import TracedRequest, band_of
from testkit.router.simulated_engines import VOCABULARY

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
"""Tokens of a request: the prompt's behind its prefix, and the mean of the output's."""
SHARES = {Band.INTERACTIVE: 0.2, Band.STANDARD: 0.4, Band.BATCH: 0.4}
NUM_TENANTS = 16
_PREFIX_TOKENS = 256
_CHARS_PER_TOKEN = 4
_cumulative_zipf = cache(cumulative_zipf)


class SimulatedRequest(TracedRequest):
    """Line of a trace file of `headway bench`, with what only the simulator knows of."""

    tenant: str = "anonymous"
    prefix: str = ""
    """Name of what the prompt begins with: prompts with the same prefix share its tokens."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Tokens of the prefix, which stand before the others."""
    ingress: float | None = Field(default=None, ge=0, lt=1)
    """Place of its ingress among all, so that one trace serves any number of ingresses. None: any."""


@dataclass(frozen=True, slots=True)
class Load:
    """Kind of load: arrivals at random, and bursts."""

    burst_share: float = 0.1
    """Share of the requests that come in bursts."""
    burst_size: int = 20
    is_burst_of_one_tenant: bool = False
    zipf_exponent: float = 0.0
    """Exponent of the tenants' demands: tenant k, from 1, has the weight k ** -zipf_exponent."""
    num_prefixes: int = 0
    """Prefixes of each tenant, drawn by Zipf's law; 0: prompts have nothing in common."""


LOADS = {
    "even": Load(),
    "uneven": Load(
        burst_share=0.5, burst_size=100, is_burst_of_one_tenant=True, zipf_exponent=1.0, num_prefixes=8
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request of the simulation."""

    at_s: float
    request: GenerateRequest
    ingress: float
    """Place of its ingress among all, from 0 to below 1."""


def made_up(load: Load, requests_per_s: float, duration_s: float, seed: int = 1) -> Iterator[SimulatedRequest]:
    """Yield the requests of a load, in order of time. Half of the tenants send all requests to one ingress."""
    rng, at_s = random.Random(seed), 0.0
    single_share = 1 - load.burst_share
    # Of the arrivals, so many are bursts that their requests have `burst_share`.
    burst_chance = load.burst_share / load.burst_size / single_share
    while at_s < duration_s:
        at_s += rng.expovariate(requests_per_s * single_share)
        tenant = _zipf(rng, NUM_TENANTS, load.zipf_exponent)
        for number in range(load.burst_size if rng.random() < burst_chance else 1):
            if number and not load.is_burst_of_one_tenant:
                tenant = _zipf(rng, NUM_TENANTS, load.zipf_exponent)
            yield _made_up_request(rng, load, at_s, tenant)


def _made_up_request(rng: random.Random, load: Load, at_s: float, tenant: int) -> SimulatedRequest:
    return SimulatedRequest(
        time=at_s,
        band=rng.choices(list(SHARES), list(SHARES.values()))[0].name.lower(),
        tenant=f"tenant-{tenant}",
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=max(1, min(4 * OUTPUT_TOKENS, round(rng.gammavariate(2.0, OUTPUT_TOKENS / 2)))),
        prefix=f"{tenant}-{_zipf(rng, load.num_prefixes, 1.0)}" if load.num_prefixes else "",
        prefix_tokens=_PREFIX_TOKENS if load.num_prefixes else 0,
        ingress=2 * tenant / NUM_TENANTS if 2 * tenant < NUM_TENANTS else rng.random(),
    )


def arrivals_of(requests: Iterable[SimulatedRequest], seed: int = 1) -> list[Arrival]:
    """Return the arrivals of a trace, each with tokens of its own behind those of its prefix."""
    rng = random.Random(seed)
    return [_arrival(request, number, rng) for number, request in enumerate(requests)]


def _arrival(traced: SimulatedRequest, number: int, rng: random.Random) -> Arrival:
    chars_per_token = 1 if isinstance(traced.prompt, list) else _CHARS_PER_TOKEN
    num_tokens = traced.prompt_tokens or max(1, len(traced.prompt or "") // chars_per_token)
    request = GenerateRequest(
        f"request-{number}",
        _prefix(traced.prefix, traced.prefix_tokens) + _tokens(rng, num_tokens),
        SamplingParams(traced.max_tokens, temperature=0.0, ignore_eos=True),
        Band.STANDARD if traced.band is None else band_of(traced.band),
        traced.tenant,
    )
    return Arrival(traced.time, request, rng.random() if traced.ingress is None else traced.ingress)


@cache
def _prefix(name: str, num_tokens: int) -> tuple[int, ...]:
    return _tokens(random.Random(name), num_tokens)


def _tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(16, VOCABULARY) for _ in range(num_tokens))


def _zipf(rng: random.Random, num: int, exponent: float) -> int:
    """Return a number below `num`, by Zipf's law."""
    return rng.choices(range(num), cum_weights=_cumulative_zipf(num, exponent))[0]
