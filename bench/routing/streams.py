"""Streams of requests that experiments offer with `headway bench`: arrivals, sizes and shared prefixes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from serve_app.benchmark.levels import Arrivals, times_at
from serve_app.benchmark.trace import TracedRequest
from serve_app.benchmark.workload import Lengths
from serve_app.config import DEMO_MODEL_NAME

_TOKEN_IDS = range(16, 4096)
"""Token ids of prompts. Lower ones are special tokens in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Shared prefixes: a prompt starts with its group's `num_tokens` tokens; groups are drawn by Zipf's law."""

    num_groups: int
    num_tokens: int
    zipf_exponent: float = 1.0
    """Exponent of the weights: group k (from 1) has weight k ** -zipf_exponent; 0 is uniform."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Poisson arrivals at a constant rate over [start_s, end_s)."""

    end_s: float
    rate_per_s: float
    start_s: float = 0.0


def consecutive(*parts: tuple[float, float]) -> tuple[Phase, ...]:
    """Return phases one after the other; each part is a duration in seconds and a rate."""
    ends_s = itertools.accumulate(duration_s for duration_s, _ in parts)
    return tuple(
        Phase(end_s, rate_per_s, end_s - duration_s)
        for end_s, (duration_s, rate_per_s) in zip(ends_s, parts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Burst:
    """Burst of `count` requests, evenly over `spread_s`: one process cannot send them all in the same instant."""

    count: int
    spread_s: float = 0.0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One kind of request with its own arrivals."""

    name: str
    prompt: Lengths
    """Prompt tokens after the shared prefix."""
    output: Lengths
    band: str = "standard"
    user: str | None = None
    """Tenant of the requests."""
    phases: tuple[Phase, ...] = ()
    bursts: tuple[Burst, ...] = ()
    prefixes: Prefixes | None = None
    max_tokens: int | None = None
    """Declared `max_tokens`. None: it is the drawn output length, and `ignore_eos` makes it exact.
    Otherwise only a `TimedRunner` knows the drawn length and ends the sequence after it (see
    `testkit.engine.timed_runner`).
    """


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Everything about a load; the same spec and seeds give the same requests at the same times."""

    streams: tuple[Stream, ...]
    seed: int = 0
    prompts_seed: int = 0
    """Seed of the prompts' tokens alone: another one gives prompts of the same lengths that no prefix cache holds."""
    model: str = DEMO_MODEL_NAME
    has_retries: bool = False
    """True: a refused request is sent up to 3 times, as the OpenAI SDKs do; False: once."""
    late_after_s: float = 0.005
    """Delay in seconds after which a send counts as late."""
    timeout_s: float = 600.0
    """Longest duration of one request."""

    def __post_init__(self) -> None:
        names = [stream.name for stream in self.streams]
        if len(set(names)) != len(names):
            raise ValueError(f"two streams have the same name among {names}: their requests would be equal")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a stream."""

    stream: str
    num_output_tokens: int
    """Output tokens that it is to produce, which may be fewer than its `max_tokens`."""
    request: TracedRequest


def make_schedule(spec: LoadSpec) -> list[Scheduled]:
    """Return all requests by time; a stream's requests depend on its name and the seeds, not on other streams."""
    made = [each for stream in spec.streams for each in _scheduled(spec, stream)]
    return sorted(made, key=lambda each: each.request.time)


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Write a trace file."""
    with path.open("w") as file:
        file.writelines(request.model_dump_json(exclude_defaults=True) + "\n" for request in requests)


def arrivals(stream: Stream, rng: random.Random) -> list[float]:
    """Return the times of a stream's requests: Poisson within each phase, evenly within each burst."""
    times = [at_s for phase in stream.phases if phase.rate_per_s for at_s in _arrivals_of_phase(phase, rng)]
    for burst in stream.bursts:
        times += [burst.at_s + burst.spread_s * number / burst.count for number in range(burst.count)]
    return sorted(times)


def _arrivals_of_phase(phase: Phase, rng: random.Random) -> Iterator[float]:
    times = (phase.start_s + at_s for at_s in times_at(phase.rate_per_s, Arrivals.POISSON, rng))
    return itertools.takewhile(lambda at_s: at_s < phase.end_s, times)


def cumulative_zipf(num: int, exponent: float) -> list[float]:
    """Return the cumulative weights of Zipf's law: item k, from 1, has the weight k ** -exponent."""
    return list(itertools.accumulate((k + 1) ** -exponent for k in range(num)))


def _scheduled(spec: LoadSpec, stream: Stream) -> Iterator[Scheduled]:
    """Yield one stream's requests. Times, sizes and tokens have separate generators, so each can change alone."""
    times, sizes, tokens = (
        random.Random(f"{seed}/{stream.name}/{kind}")
        for seed, kind in ((spec.seed, "times"), (spec.seed, "sizes"), (f"{spec.seed}/{spec.prompts_seed}", "tokens"))
    )
    prefixes = _prefixes(spec, stream.prefixes)
    weights = cumulative_zipf(len(prefixes), stream.prefixes.zipf_exponent if stream.prefixes else 0.0)
    for at_s in arrivals(stream, times):
        [prefix] = sizes.choices(prefixes, cum_weights=weights)
        prompt = prefix + tokens.choices(_TOKEN_IDS, k=stream.prompt.draw(sizes))
        num_output_tokens = stream.output.draw(sizes)
        extra: dict[str, object] = {"ignore_eos": True}
        if stream.max_tokens is not None:  # a `TimedRunner` reads the length from the seed
            extra = {"seed": len(prompt) + num_output_tokens}
        if stream.user is not None:
            extra["user"] = stream.user
        request = TracedRequest(
            time=at_s,
            prompt=prompt,
            max_tokens=stream.max_tokens or num_output_tokens,
            band=stream.band,
            extra_body=extra,
        )
        yield Scheduled(stream.name, num_output_tokens, request)


def _prefixes(spec: LoadSpec, prefixes: Prefixes | None) -> list[list[int]]:
    """Return the groups' tokens; streams with equal numbers and lengths of prefixes share them."""
    if prefixes is None:
        return [[]]
    rng = random.Random(f"{spec.seed}/{spec.prompts_seed}/prefixes/{prefixes.num_groups}/{prefixes.num_tokens}")
    return [rng.choices(_TOKEN_IDS, k=prefixes.num_tokens) for _ in range(prefixes.num_groups)]
