"""Throughput of batches, for estimates of their end and for the detection of late ones, and the backlog that waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest

from replicas.protocol import Band
from replicas.timing.clock import Clock
from replicas.timing.rates import SlidingRate
from router.scaling.autoscaling_loop import BacklogWork
from serve_app.jobs.storage.lines import LineResult
from serve_app.jobs.storage.ownership import Speed
from serve_app.jobs.storage.rows.batch_queue import Backlog

_WINDOW_S = 60.0
_RESOLUTION_S = 1.0
_MARGIN = 1.3
"""Safety factor: the time that a batch needs is multiplied by it, because the speed may fall."""
_NEEDED_AT_UNKNOWN_SPEED_S = 300.0
"""Seconds that a batch is assumed to need while no speed is known."""
_MAX_PUBLISHED = 100
"""Most batches, and most tenants, whose speed other workers learn: the fastest."""


class ThroughputEstimator:
    """Rate meters of ended lines, in expected tokens per second; waiting lines are counted in expected tokens too.

    It measures the lines that ended here, and adds the speeds that the other workers last published.

    A batch is late if the waiting work that is due by its deadline takes longer than the time left. The estimate takes
    the speed of all batches together, with a safety margin. While a batch is late, its lines run in a more urgent band.
    It may become punctual again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all = self._new_rate()
        self._output: dict[str, SlidingRate] = {}
        """Rates of output tokens, by tenant."""
        self._batches: dict[str, SlidingRate] = {}
        self._expected = 1.0
        self._actual = 1.0
        self.others: Sequence[Speed] = ()
        """Speeds of the other workers."""

    def own_speed(self) -> Speed:
        """Return this worker's speed, for the others."""
        return Speed(self._per_s(self._all), self._fastest(self._batches), self._fastest(self._output))

    def began(self, batch_id: str) -> None:
        """Start the rate meter of a batch when its first line is leased here."""
        if batch_id not in self._batches:
            self._batches[batch_id] = self._new_rate()

    def ended(self, results: Iterable[LineResult]) -> None:
        """Count the tokens of lines that have ended."""
        now = self._clock.monotonic()
        for result in results:
            line = result.line
            self._all.add(line.expected_tokens, now)
            if (rate := self._batches.get(line.batch_id)) is not None:
                rate.add(line.expected_tokens, now)
            self._output.setdefault(line.tenant, self._new_rate()).add(result.num_output_tokens, now)
            self._learn_ratio(result)

    def retain(self, batch_ids: Collection[str]) -> None:
        """Drop the rate meters of all batches except these."""
        self._batches = {batch_id: rate for batch_id, rate in self._batches.items() if batch_id in batch_ids}

    def eta_s(self, batch_id: str, waiting_tokens: int) -> float | None:
        """Return the seconds until a batch has done `waiting_tokens` at its own speed; None: its speed is not known."""
        elsewhere = sum(other.by_batch.get(batch_id, 0.0) for other in self.others)
        tokens_per_s = self._per_s(self._batches.get(batch_id)) + elsewhere
        return waiting_tokens / tokens_per_s if tokens_per_s > 0 else None

    def eta_of_all_s(self, backlog: Iterable[Backlog]) -> float:
        """Return the seconds until the backlog is done at the speed of all batches together; infinite at zero speed."""
        tokens, tokens_per_s = sum(part.tokens for part in backlog), self._per_s_of_all()
        if tokens == 0:
            return 0.0
        return tokens / tokens_per_s if tokens_per_s > 0 else float("inf")

    def output_tokens_per_s(self, tenant: str) -> float:
        """Return the output tokens per second of a tenant's lines over the last minute."""
        elsewhere = sum(other.output_by_tenant.get(tenant, 0.0) for other in self.others)
        return self._per_s(self._output.get(tenant)) + elsewhere

    @property
    def actual_per_expected(self) -> float:
        """Ratio of the actual tokens of recent lines to their expected tokens."""
        return self._actual / self._expected

    def late_deadline(self, backlog: Iterable[Backlog], now_unix_s: float) -> float:
        """Return a unix time: batches with a deadline up to it are late; -inf: none is late."""
        tokens_per_s, tokens, late = self._per_s_of_all(), 0, float("-inf")
        due = [(b.expires_unix_s, b.tokens) for b in backlog if b.band is Band.BATCH and b.expires_unix_s is not None]
        for expires_unix_s, its_tokens in sorted(due):
            tokens += its_tokens
            left_s = expires_unix_s - now_unix_s
            needed_s = _MARGIN * tokens / tokens_per_s if tokens_per_s > 0 else _NEEDED_AT_UNKNOWN_SPEED_S
            if needed_s > left_s:
                late = expires_unix_s
        return late

    def _new_rate(self) -> SlidingRate:
        return SlidingRate(_WINDOW_S, self._clock.monotonic(), _RESOLUTION_S)

    def _per_s(self, rate: SlidingRate | None) -> float:
        """Return the mean rate over the last minute, or since the meter's start; 0 without a meter."""
        return 0.0 if rate is None else rate.per_s(self._clock.monotonic())

    def _per_s_of_all(self) -> float:
        """Return the speed of all batches in all workers."""
        return self._per_s(self._all) + sum(other.expected for other in self.others)

    def _fastest(self, rates: Mapping[str, SlidingRate]) -> dict[str, float]:
        speeds = {name: speed for name, rate in rates.items() if (speed := self._per_s(rate)) > 0}
        return dict(nlargest(_MAX_PUBLISHED, speeds.items(), key=lambda item: item[1]))

    def _learn_ratio(self, result: LineResult) -> None:
        """Add a line to the sums, which decay by a factor of 0.99 per line: about the last hundred lines count."""
        actual = result.num_prompt_tokens + result.num_output_tokens
        if actual:
            self._expected = 0.99 * self._expected + result.line.expected_tokens
            self._actual = 0.99 * self._actual + actual


class BacklogView:
    """Backlog found by the latest poll of the database; a `router.scaling.autoscaling_loop.BacklogSource`."""

    def __init__(self, clock: Clock) -> None:
        self.throughput = ThroughputEstimator(clock)
        self.waiting: Sequence[Backlog] = ()
        """Queued lines in the database, those of all workers."""
        self.not_sent: Sequence[Backlog] = ()
        """Leased lines that are not yet in flow control's queue, for example because no replica was ever ready."""

    @property
    def num_workers(self) -> int:
        """Number of workers that share the queued lines, this one included."""
        return 1 + len(self.throughput.others)

    def num_requests(self) -> int:
        """Return the number of waiting lines, of the queued ones this worker's share."""
        num_queued = sum(backlog.num_lines for backlog in self.waiting)
        return -(-num_queued // self.num_workers) + sum(backlog.num_lines for backlog in self.not_sent)

    def eta_s(self) -> float:
        """Return the estimated seconds until all queued lines in the database are done; infinite at zero speed."""
        return self.throughput.eta_of_all_s(self.waiting)

    def work(self) -> Sequence[BacklogWork]:
        """Return the tokens that the waiting lines will need, by band and deadline.

        Of the queued lines only this worker's share counts: every worker reports, and the autoscaler adds them up.
        """
        ratio = self.throughput.actual_per_expected
        shares = ((self.waiting, ratio / self.num_workers), (self.not_sent, ratio))
        return [
            BacklogWork(backlog.band, int(factor * backlog.tokens) + 1, backlog.expires_unix_s)
            for backlogs, factor in shares
            for backlog in backlogs
        ]
