"""Requests of a load: sizes, bands and times that follow from a seed, or those of a trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Self

from replicas.protocol import Band
from serve_app.benchmark.prompts import TokenScale, words
from serve_app.benchmark.rows import Row
from serve_app.benchmark.sender import ScheduledRequest
from serve_app.benchmark.trace import TracedRequest, band_of


class Endpoint(Enum):
    """Kind of the requests."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts within [low, high]: uniform, or log-normal around a median."""

    low: int
    high: int
    median: float | None = None
    """Median of the log-normal distribution; None: uniform."""
    sigma: float = 0.0
    """Deviation of the logarithm."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `N`, `LOW:HIGH` or `LOW:HIGH:MEDIAN:SIGMA`.

        Raises:
            ValueError: the text has another form, or the numbers contradict each other.
        """
        try:
            low, high, *shape = text.split(":") if ":" in text else (text, text)
            lengths = cls(int(low), int(high), *(float(number) for number in shape))
        except (ValueError, TypeError):
            raise ValueError(f"'{text}' is not of the form N, LOW:HIGH or LOW:HIGH:MEDIAN:SIGMA") from None
        if len(shape) not in (0, 2):
            raise ValueError(f"'{text}' has a median but no sigma, such as 16:2048:256:0.6")
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"'{text}' must have 1 <= low <= high; it has {lengths.low} and {lengths.high}")
        if lengths.median is not None and not (lengths.low <= lengths.median <= lengths.high and lengths.sigma >= 0):
            raise ValueError(f"'{text}' must have low <= median <= high and sigma >= 0")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Draw one count."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))
        return min(self.high, max(self.low, drawn))


@dataclass(frozen=True, slots=True)
class Workload:
    """Content of the requests; the same workload has the same sizes and bands in every run."""

    model: str
    endpoint: Endpoint
    prompt_tokens: Lengths
    max_tokens: Lengths
    shared_prefix_tokens: int = 0
    """Tokens with which all prompts begin, as a part of their length."""
    bands: Mapping[Band, float] = field(default_factory=dict)
    """Weights of the bands; none: requests name no band."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Further fields of each body."""
    seed: int = 0
    scale: TokenScale = field(default_factory=TokenScale)


class RequestFactory:
    """Maker of requests whose sizes and bands follow from the workload's seed, and whose words are new in each run.

    New words keep a server's prefix cache from the prompts of an earlier run or level. The shared prefix is the same
    in all runs.
    """

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self._workload = workload
        self._rng = rng
        prefix_words = workload.scale.num_words(workload.shared_prefix_tokens + round(workload.scale.fixed))
        is_shared = workload.shared_prefix_tokens > 0
        self._prefix = words(prefix_words, random.Random(f"{workload.seed}/prefix")) if is_shared else []

    def requests(self, stream: str) -> Iterator[ScheduledRequest]:
        """Yield requests without end; those of a number have the same sizes in each stream."""
        sizes = random.Random(f"{self._workload.seed}/sizes")
        bands = list(self._workload.bands)
        weights = list(self._workload.bands.values())
        for index in count():
            num_prompt_tokens = self._workload.prompt_tokens.draw(sizes)
            max_tokens = self._workload.max_tokens.draw(sizes)
            band = sizes.choices(bands, weights)[0] if bands else None
            yield self.request(Row(index, num_prompt_tokens, max_tokens, 0.0, stream=stream), band)

    def traced(self, trace: Iterable[TracedRequest], stream: str) -> Iterator[ScheduledRequest]:
        """Yield the requests of a trace."""
        for index, traced in enumerate(trace):
            band = None if traced.band is None else band_of(traced.band)
            num_tokens = len(traced.prompt) if isinstance(traced.prompt, list) else traced.prompt_tokens or 0
            row = Row(index, num_tokens, traced.max_tokens, traced.time, stream=stream)
            yield self.request(row, band, traced)

    def request(self, row: Row, band: Band | None, traced: TracedRequest | None = None) -> ScheduledRequest:
        """Return one request for a row; that of a trace may have its own prompt and further fields."""
        prompt = self._words(row) if traced is None or traced.prompt is None else traced.prompt
        body = body_of(self._workload, prompt, row.num_output_tokens)
        if traced is not None:
            body |= traced.extra_body
        if band is not None:
            row.priority = int(band)
            body["priority"] = int(band)
        return ScheduledRequest(row, json.dumps(body, separators=(",", ":")).encode())

    def _words(self, row: Row) -> str:
        num_words = self._workload.scale.num_words(row.num_prompt_tokens)
        own = words(max(1, num_words - len(self._prefix)), self._rng)
        return " ".join([*self._prefix, *own])


def body_of(workload: Workload, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a streamed request that asks for the usage."""
    is_chat = workload.endpoint is Endpoint.CHAT
    return {
        "model": workload.model,
        **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **workload.fields,
    }
