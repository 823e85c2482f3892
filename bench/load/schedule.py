"""Schedule of a spec: all requests with their times, computed before anything is sent."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass

from bench.load.spec import Burst, Lengths, LoadSpec, Phase, Prefixes, Stream

_FIRST_TOKEN_ID = 16
"""Lowest token id of prompts. Lower ids are special tokens in most vocabularies."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request, ready to be sent."""

    index: int
    stream: str
    priority: int
    user: str | None
    group: int | None
    """Index of the prefix group."""
    at_s: float
    """Seconds after the start."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens it will produce."""
    body: bytes


def make_schedule(spec: LoadSpec) -> list[ScheduledRequest]:
    """Return all requests by time; a stream's requests depend on its name and the seed, not on other streams."""
    made = [request for stream in spec.streams for request in _requests(spec, stream)]
    made.sort(key=lambda request: request.at_s)
    return [
        ScheduledRequest(
            index=index,
            stream=request.stream.name,
            priority=request.stream.priority,
            user=request.stream.user,
            group=request.group,
            at_s=request.at_s,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=request.num_output_tokens,
            body=_body(spec, request),
        )
        for index, request in enumerate(made)
    ]


def arrivals(phases: tuple[Phase, ...], bursts: tuple[Burst, ...], rng: random.Random) -> list[float]:
    """Return the times of a stream's requests: Poisson within each phase, evenly within each burst."""
    times: list[float] = []
    for phase in phases:
        at_s = phase.start_s
        while phase.rate_per_s > 0:
            at_s += rng.expovariate(phase.rate_per_s)
            if at_s >= phase.end_s:
                break
            times.append(at_s)
    for burst in bursts:
        times += [burst.at_s + burst.spread_s * number / burst.count for number in range(burst.count)]
    return sorted(times)


def draw_length(lengths: Lengths, rng: random.Random) -> int:
    """Draw one length of a distribution."""
    [part] = rng.choices(lengths.parts, [part.weight for part in lengths.parts])
    drawn = round(part.median * math.exp(part.sigma * rng.gauss(0.0, 1.0)))
    return min(lengths.high, max(lengths.low, drawn))


@dataclass(frozen=True, slots=True)
class _Made:
    stream: Stream
    at_s: float
    group: int | None
    prompt: list[int]
    num_output_tokens: int


def _requests(spec: LoadSpec, stream: Stream) -> list[_Made]:
    """Return one stream's requests. Times and sizes have separate random generators, so each can change alone."""
    times_rng = random.Random(f"{spec.seed}/{stream.name}/times")
    sizes_rng = random.Random(f"{spec.seed}/{stream.name}/sizes")
    prefixes = _prefixes(spec, stream.prefixes)
    weights = _cumulative_weights(stream.prefixes)
    made = []
    for at_s in arrivals(stream.phases, stream.bursts, times_rng):
        group = sizes_rng.choices(range(len(prefixes)), cum_weights=weights)[0] if prefixes else None
        own = _tokens(spec, draw_length(stream.prompt, sizes_rng), sizes_rng)
        prompt = own if group is None else prefixes[group] + own
        made.append(_Made(stream, at_s, group, prompt, draw_length(stream.output, sizes_rng)))
    return made


def _prefixes(spec: LoadSpec, prefixes: Prefixes | None) -> list[list[int]]:
    """Return the groups' tokens; streams with equal numbers and lengths of prefixes share them."""
    if prefixes is None:
        return []
    rng = random.Random(f"{spec.seed}/prefixes/{prefixes.num_groups}/{prefixes.num_tokens}")
    return [_tokens(spec, prefixes.num_tokens, rng) for _ in range(prefixes.num_groups)]


def _cumulative_weights(prefixes: Prefixes | None) -> list[float]:
    if prefixes is None:
        return []
    return list(itertools.accumulate((k + 1) ** -prefixes.zipf_exponent for k in range(prefixes.num_groups)))


def _tokens(spec: LoadSpec, num_tokens: int, rng: random.Random) -> list[int]:
    num_ids = spec.vocab_size - _FIRST_TOKEN_ID
    return [_FIRST_TOKEN_ID + (drawn + spec.shift) % num_ids for drawn in rng.choices(range(num_ids), k=num_tokens)]


def _body(spec: LoadSpec, request: _Made) -> bytes:
    """Return the request body; a hidden output length is passed to a `TimedRunner` as `seed`."""
    stream = request.stream
    body: dict[str, object] = {
        "model": spec.model,
        "prompt": request.prompt,
        "stream": True,
        "return_token_ids": True,
        "temperature": stream.temperature,
        "priority": stream.priority,
        "max_tokens": stream.max_tokens or request.num_output_tokens,
    }
    if stream.max_tokens is None:
        body["ignore_eos"] = True
    else:
        body["seed"] = len(request.prompt) + request.num_output_tokens
    if stream.user is not None:
        body["user"] = stream.user
    return json.dumps(body, separators=(",", ":")).encode()
