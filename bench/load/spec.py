"""Specification of a load, read from JSON: streams of requests, their sizes, shared prefixes and latency targets."""

from __future__ import annotations

import itertools
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Component(_Spec):
    """One part of a mixture: a log-normal around `median`; `sigma` 0 always gives the median."""

    median: float = Field(gt=0)
    sigma: float = Field(default=0.0, ge=0)
    weight: float = Field(default=1.0, gt=0)


class Lengths(_Spec):
    """Distribution of token counts: a mixture of log-normals, clamped to [low, high]."""

    parts: tuple[Component, ...] = Field(min_length=1)
    low: int = Field(default=1, ge=1)
    high: int = Field(default=1_000_000, ge=1)

    @classmethod
    def around(cls, median: float, sigma: float = 0.0, low: int = 1, high: int = 1_000_000) -> Self:
        """Return a distribution of one log-normal."""
        return cls(parts=(Component(median=median, sigma=sigma),), low=low, high=high)


class Prefixes(_Spec):
    """Shared prefixes: a prompt starts with its group's `num_tokens` tokens; groups are drawn by Zipf's law."""

    num_groups: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    zipf_exponent: float = Field(default=1.0, ge=0)
    """Exponent of the weights: group k (from 1) has weight k ** -zipf_exponent; 0 is uniform."""


class Phase(_Spec):
    """Poisson arrivals at a constant rate over [start_s, end_s)."""

    start_s: float = Field(default=0.0, ge=0)
    end_s: float
    rate_per_s: float = Field(ge=0)


def consecutive(*parts: tuple[float, float]) -> tuple[Phase, ...]:
    """Return phases one after the other; each part is a duration in seconds and a rate."""
    ends_s = itertools.accumulate(duration_s for duration_s, _ in parts)
    return tuple(
        Phase(start_s=end_s - duration_s, end_s=end_s, rate_per_s=rate_per_s)
        for end_s, (duration_s, rate_per_s) in zip(ends_s, parts, strict=True)
    )


class Burst(_Spec):
    """Burst of `count` requests, evenly over `spread_s`: one process cannot send them all in the same instant."""

    at_s: float = Field(default=0.0, ge=0)
    count: int = Field(ge=1)
    spread_s: float = Field(default=0.0, ge=0)


class Targets(_Spec):
    """Latency targets of a band. The tokens of a request that meets both count as goodput."""

    ttft_s: float | None = Field(default=None, gt=0)
    """Longest time to first token; none: no limit."""
    tpot_s: float | None = Field(default=None, gt=0)
    """Longest time per output token; none: no limit."""

    def are_met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Return True if a request with these times met both; a request of one chunk has no `tpot_s` to miss."""
        has_met_ttft = ttft_s is not None and (self.ttft_s is None or ttft_s <= self.ttft_s)
        return has_met_ttft and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)


class Stream(_Spec):
    """One kind of request with its own arrivals."""

    name: str
    priority: int = Field(default=1, ge=0, le=2)
    """Band: 0 interactive, 1 standard, 2 batch."""
    user: str | None = None
    """Tenant of the requests."""
    phases: tuple[Phase, ...] = ()
    bursts: tuple[Burst, ...] = ()
    prompt: Lengths = Lengths.around(64)
    """Prompt tokens after the shared prefix."""
    output: Lengths = Lengths.around(32)
    prefixes: Prefixes | None = None
    max_tokens: int | None = None
    """Declared `max_tokens`. None: it is the drawn output length, and `ignore_eos` makes it exact.
    Otherwise only a `TimedRunner` knows the drawn length and ends the sequence after it (see
    `testkit.engine.timed_runner`).
    """
    temperature: float = Field(default=0.0, ge=0)


class LoadSpec(_Spec):
    """Everything about a run; the same spec and seed give the same requests at the same times."""

    streams: tuple[Stream, ...] = Field(min_length=1)
    seed: int = 0
    model: str = "headway-demo"
    vocab_size: int = 4096
    """End of the range of prompt token ids, which starts at 16."""
    shift: int = Field(default=0, ge=0)
    """Offset added to all token ids: gives prompts of the same lengths that no prefix cache holds."""
    targets: dict[int, Targets] = {}
    """Targets by priority; a band that is missing has no limits."""
    has_retries: bool = False
    """true: a refused request is sent up to 3 times, as the OpenAI SDKs do; false: once."""
    late_after_s: float = Field(default=0.005, gt=0)
    """Delay in seconds after which a send counts as late."""
    max_late_share: float = Field(default=0.01, ge=0)
    """Largest share of late requests; above it the run is void."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest duration of one request."""
    end_s: float | None = None
    """Seconds after the start at which open requests are cut off and counted; none: all are waited for."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [stream.name for stream in self.streams]
        if len(set(names)) != len(names):
            raise ValueError(f"two streams have the same name among {names}: their requests would be equal")
        return self
