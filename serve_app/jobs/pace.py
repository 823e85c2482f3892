"""How fast batches go: for their clients, and to see in time which of them would come too late."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from replicas.clock import Clock
from replicas.protocol import Band
from replicas.rates import SlidingRate
from serve_app.jobs.lease_rows import LineResult
from serve_app.jobs.queue_rows import Backlog

_WINDOW_S = 60.0
_RESOLUTION_S = 1.0
_MARGIN = 1.3
"""A batch is late when it would need so much of the time it has left, since no speed lasts."""
_UNKNOWN_SHARE_S = 300.0
"""While no speed is known, a batch is late when less than this is left to it, seconds."""


class Pace:
    """Measures what ends, in expected tokens of lines: in them also what waits is counted.

    A batch is late when all that waits with its deadline or an earlier one, at the speed of all together, would
    take longer than the time it has left, with a margin. From then on its lines run in a more urgent band; since
    the speed grows by that, and work ends, it may come back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all = self._new_rate()
        self._output: dict[str, SlidingRate] = {}
        """Output tokens, by tenant."""
        self._batches: dict[str, SlidingRate] = {}
        self._expected = 1.0
        self._real = 1.0

    def began(self, batch_id: str) -> None:
        """A batch's first line, as far as known here, runs."""
        if batch_id not in self._batches:
            self._batches[batch_id] = self._new_rate()

    def ended(self, results: Iterable[LineResult]) -> None:
        """Learn from lines that have ended."""
        now = self._clock.monotonic()
        for result in results:
            line = result.line
            self._all.add(line.expected_tokens, now)
            if (rate := self._batches.get(line.batch_id)) is not None:
                rate.add(line.expected_tokens, now)
            self._output.setdefault(line.tenant, self._new_rate()).add(result.num_output_tokens, now)
            self._learn_ratio(result)

    def forget_all_but(self, batch_ids: Collection[str]) -> None:
        """No other batch has lines that run or wait."""
        self._batches = {batch_id: rate for batch_id, rate in self._batches.items() if batch_id in batch_ids}

    def eta_s(self, batch_id: str, waiting_tokens: int) -> float | None:
        """Seconds until so much of a batch is done at its own speed; None: it has none."""
        tokens_per_s = self._per_s(self._batches.get(batch_id))
        return waiting_tokens / tokens_per_s if tokens_per_s > 0 else None

    def eta_of_all_s(self, backlog: Iterable[Backlog]) -> float:
        """Seconds until everything that waits is done at the speed of all; infinite where nothing moves."""
        tokens, tokens_per_s = sum(part.tokens for part in backlog), self._per_s(self._all)
        if tokens == 0:
            return 0.0
        return tokens / tokens_per_s if tokens_per_s > 0 else float("inf")

    def output_tokens_per_s(self, tenant: str) -> float:
        """Of a tenant's lines, over the last minute."""
        return self._per_s(self._output.get(tenant))

    @property
    def real_per_expected(self) -> float:
        """Tokens that a line really needs for each that it was expected to."""
        return self._real / self._expected

    def late_before(self, backlog: Iterable[Backlog], now_unix_s: float) -> float:
        """Batches whose deadline, unix seconds, is not after this are late; -inf: none is."""
        tokens_per_s, tokens, late = self._per_s(self._all), 0, float("-inf")
        for expires_unix_s, its_tokens in _by_deadline(backlog):
            tokens += its_tokens
            left_s = expires_unix_s - now_unix_s
            needed_s = _MARGIN * tokens / tokens_per_s if tokens_per_s > 0 else _UNKNOWN_SHARE_S
            if needed_s > left_s:
                late = expires_unix_s
        return late

    def _new_rate(self) -> SlidingRate:
        return SlidingRate(_WINDOW_S, self._clock.monotonic(), _RESOLUTION_S)

    def _per_s(self, rate: SlidingRate | None) -> float:
        """The mean over the last minute, or since the start."""
        return 0.0 if rate is None else rate.per_s(self._clock.monotonic())

    def _learn_ratio(self, result: LineResult) -> None:
        """An average that forgets: the last some hundred lines decide."""
        real = result.num_prompt_tokens + result.num_output_tokens
        if real:
            self._expected = 0.99 * self._expected + result.line.expected_tokens
            self._real = 0.99 * self._real + real


def _by_deadline(backlog: Iterable[Backlog]) -> list[tuple[float, int]]:
    due = [(b.expires_unix_s, b.tokens) for b in backlog if b.band is Band.BATCH and b.expires_unix_s is not None]
    return sorted(due)
