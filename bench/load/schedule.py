"""Schedule of a spec: all requests with their times, computed before anything is sent."""

from __future__ import annotations

import itertools
import json
import math
import random

from bench.load.spec import Burst, Lengths, LoadSpec, Phase, Prefixes, Stream
from serve_app.benchmark.rows import Row
from serve_app.benchmark.sender import ScheduledRequest

_FIRST_TOKEN_ID = 16
"""Lowest token id of prompts. Lower ids are special tokens in most vocabularies."""


def make_schedule(spec: LoadSpec) -> list[ScheduledRequest]:
    """Return all requests by time; a stream's requests depend on its name and the seed, not on other streams."""
    made = [request for stream in spec.streams for request in _requests(spec, stream)]
    made.sort(key=lambda request: request.row.scheduled_s)
    for index, request in enumerate(made):
        request.row.index = index
    return made


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


def cumulative_zipf(num: int, exponent: float) -> list[float]:
    """Return the cumulative weights of Zipf's law: item k, from 1, has the weight k ** -exponent."""
    return list(itertools.accumulate((k + 1) ** -exponent for k in range(num)))


def _requests(spec: LoadSpec, stream: Stream) -> list[ScheduledRequest]:
    """Return one stream's requests. Times and sizes have separate random generators, so each can change alone."""
    times_rng = random.Random(f"{spec.seed}/{stream.name}/times")
    sizes_rng = random.Random(f"{spec.seed}/{stream.name}/sizes")
    prefixes = _prefixes(spec, stream.prefixes)
    weights = cumulative_zipf(len(prefixes), stream.prefixes.zipf_exponent) if stream.prefixes else []
    made = []
    for at_s in arrivals(stream.phases, stream.bursts, times_rng):
        group = sizes_rng.choices(range(len(prefixes)), cum_weights=weights)[0] if prefixes else None
        own = _tokens(spec, draw_length(stream.prompt, sizes_rng), sizes_rng)
        prompt = own if group is None else prefixes[group] + own
        num_output_tokens = draw_length(stream.output, sizes_rng)
        row = Row(
            0, len(prompt), num_output_tokens, at_s, stream.priority, stream=stream.name, user=stream.user, group=group
        )
        made.append(ScheduledRequest(row, _body(spec, stream, prompt, num_output_tokens)))
    return made


def _prefixes(spec: LoadSpec, prefixes: Prefixes | None) -> list[list[int]]:
    """Return the groups' tokens; streams with equal numbers and lengths of prefixes share them."""
    if prefixes is None:
        return []
    rng = random.Random(f"{spec.seed}/prefixes/{prefixes.num_groups}/{prefixes.num_tokens}")
    return [_tokens(spec, prefixes.num_tokens, rng) for _ in range(prefixes.num_groups)]


def _tokens(spec: LoadSpec, num_tokens: int, rng: random.Random) -> list[int]:
    num_ids = spec.vocab_size - _FIRST_TOKEN_ID
    return [_FIRST_TOKEN_ID + (drawn + spec.shift) % num_ids for drawn in rng.choices(range(num_ids), k=num_tokens)]


def _body(spec: LoadSpec, stream: Stream, prompt: list[int], num_output_tokens: int) -> bytes:
    """Return the request body; a hidden output length is passed to a `TimedRunner` as `seed`."""
    body: dict[str, object] = {
        "model": spec.model,
        "prompt": prompt,
        "stream": True,
        "return_token_ids": True,
        "temperature": stream.temperature,
        "priority": stream.priority,
        "max_tokens": stream.max_tokens or num_output_tokens,
    }
    if stream.max_tokens is None:
        body["ignore_eos"] = True
    else:
        body["seed"] = len(prompt) + num_output_tokens
    if stream.user is not None:
        body["user"] = stream.user
    return json.dumps(body, separators=(",", ":")).encode()
