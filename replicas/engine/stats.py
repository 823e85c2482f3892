"""Statistics of an engine: counters, rates and histograms, with vLLM's names, units and buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from enum import Enum

import numpy as np

from replicas.engine.batch import CollectedStep, ScheduledBatch
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import DEVICE_S, LAST_TOKEN_S, WORK, Phase, Sequence, SequenceStatus
from replicas.engine.sequence_table import SequenceTable
from replicas.protocol import Band, FinishReason, HistogramMetric, Metric, MetricKind, TenantTokens
from replicas.timing.rates import SlidingRate

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_SHARES = tuple(tenth / 10 for tenth in range(1, 11))
_NUM_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
_REFUSALS_HELP = "requests returned to the ingress to wait again; vllm:admission_rejections counts refusals of clients"
_PADDING_HELP = (
    "tokens of a step / (its sequences x the most tokens of one): the useful share of a padded batch; "
    "the engine pads nothing"
)
_WASTE_HELP = (
    "tokens computed in vain: again after a preemption, for a sequence that had ended already, or (prompt "
    "beyond the prefix hit, and output) for requests that were aborted or whose deadline passed; share = "
    "this / vllm:iteration_tokens_total_sum"
)
_RATE_WINDOW_S = 5.0
_MANY_VALUES = 16
"""Values from which on it is faster to count them in an array."""
START_TIME = "headway:engine_start_time_seconds"
"""Name of the gauge with the start of an engine, from which its counters and histograms count."""
_MAX_TENANT_ENTRIES = 64


def one_two_five(up_to: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 ... up to and including the first number that reaches `up_to`."""
    bounds: list[float] = []
    scale = 1
    while not bounds or bounds[-1] < up_to:
        for mantissa in (1, 2, 5):
            if not bounds or bounds[-1] < up_to:
                bounds.append(float(mantissa * scale))
        scale *= 10
    return tuple(bounds)


class Histogram:
    """Histogram: counts of observations in buckets (bounds[i - 1], bounds[i]], the last one without upper bound."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help, self._bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: np.ndarray) -> None:
        """Count observations."""
        if len(values) < _MANY_VALUES:
            for value in values.tolist():
                self.observe(value)
            return
        for index, count in enumerate(np.bincount(np.searchsorted(self._bounds, values)).tolist()):
            self._counts[index] += count
        self._sum += float(values.sum())

    def snapshot(self) -> HistogramMetric:
        """Return the distribution so far."""
        return HistogramMetric(self._name, self._help, self._bounds, tuple(self._counts), self._sum)


class TokenRate:
    """Tokens per second of computing time, over recent steps; written by the engine thread, read by any."""

    def __init__(self) -> None:
        self._rate = SlidingRate(_RATE_WINDOW_S, start_s=0.0)
        self._computed_s = 0.0
        self.tokens_per_s = 0.0
        """Present rate; 0 before the first step."""

    def step(self, duration_s: float, num_tokens: int) -> None:
        """Count a step that took `duration_s` for `num_tokens`."""
        self._computed_s += duration_s
        self._rate.add(num_tokens, self._computed_s, duration_s)
        self.tokens_per_s = self._rate.per_s(self._computed_s)


class TenantUsage:
    """Tokens computed for each tenant in each band. At most 64 entries: those served longest ago are forgotten."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, Band], int] = OrderedDict()

    def add(self, tenant: str, band: Band, num_tokens: int) -> None:
        """Count tokens computed for a tenant."""
        key = (tenant, band)
        # Assign, then move: a reader in another thread never finds the tenant missing.
        self._tokens[key] = self._tokens.get(key, 0) + num_tokens
        self._tokens.move_to_end(key)
        if len(self._tokens) > _MAX_TENANT_ENTRIES:
            self._tokens.popitem(last=False)

    def snapshot(self) -> tuple[TenantTokens, ...]:
        """Return the tokens of each tenant and band, those served longest ago first."""
        return tuple(TenantTokens(tenant, band, tokens) for (tenant, band), tokens in list(self._tokens.items()))


class WasteCause(Enum):
    """Cause of wasted tokens.

    A token counts as often as it was computed in vain, so that the sum is a share of all computed tokens.
    """

    PREEMPT = "preempt"
    """The tokens were computed again after a preemption for slots or blocks."""
    FAIRNESS = "fairness"
    """The tokens were computed again after a preemption for another tenant's fair share of slots or blocks."""
    ABORT = "abort"
    """The request was aborted: its client disconnected or cancelled."""
    EXPIRED = "expired"
    """The request's deadline passed before it was finished."""
    SURPLUS = "surplus"
    """The sequence had ended with the token before, which was not known at launch (`async_scheduling`)."""


class _RequestHistograms:
    """Distributions over requests that have ended."""

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self._tpot = Histogram(
            "vllm:request_time_per_output_token_seconds", "(last - first token) / (output tokens - 1)", _TOKEN_GAP_S
        )
        self._e2e = Histogram("vllm:e2e_request_latency_seconds", "arrival to end", _REQUEST_S)
        self._queue = Histogram("vllm:request_queue_time_seconds", "arrival to first scheduled", _REQUEST_S)
        self._inference = Histogram("vllm:request_inference_time_seconds", "first scheduled to last token", _REQUEST_S)
        self._prefill = Histogram("vllm:request_prefill_time_seconds", "first scheduled to first token", _REQUEST_S)
        self._decode = Histogram("vllm:request_decode_time_seconds", "first to last token", _REQUEST_S)
        self._prompt_tokens = Histogram("vllm:request_prompt_tokens", "prompt tokens of a request", lengths)
        self._output_tokens = Histogram("vllm:request_generation_tokens", "output tokens of a request", lengths)
        self._max_tokens = Histogram(
            "vllm:request_params_max_tokens", "most output tokens that a request allows (`max_tokens`)", lengths
        )
        self._computed = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "prompt tokens not found in the prefix cache", lengths
        )
        self._preemptions = Histogram("vllm:request_num_preemptions", "preemptions of a request", _NUM_PREEMPTIONS)

    def observe(self, sequence: Sequence, now: float) -> None:
        """Count a request that has ended."""
        self._e2e.observe(now - sequence.arrival_s)
        self._prompt_tokens.observe(sequence.num_prompt_tokens)
        self._output_tokens.observe(sequence.num_output_tokens)
        self._max_tokens.observe(sequence.request.params.max_tokens)
        self._preemptions.observe(sequence.num_preemptions)
        if sequence.first_scheduled_s is None:
            return
        self._queue.observe(sequence.first_scheduled_s - sequence.arrival_s)
        self._computed.observe(sequence.num_prompt_tokens - (sequence.num_cached_tokens or 0))
        if sequence.first_token_s is None or sequence.last_token_s is None:
            return
        self._prefill.observe(sequence.first_token_s - sequence.first_scheduled_s)
        self._decode.observe(sequence.last_token_s - sequence.first_token_s)
        self._inference.observe(sequence.last_token_s - sequence.first_scheduled_s)
        num_here = sequence.num_output_tokens - len(sequence.request.output_token_ids)
        if num_here > 1:
            self._tpot.observe((sequence.last_token_s - sequence.first_token_s) / (num_here - 1))


class EngineStats:
    """Observer of one engine: turns its events into counters and histograms.

    Written by the engine thread, read by any.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.rate = TokenRate()
        self.saturated_rate = TokenRate()
        self.tenant_usage = TenantUsage()
        self._config = config
        self._tokens: Counter[str] = Counter()
        self._wasted: Counter[WasteCause] = Counter()
        self._finished: Counter[FinishReason] = Counter()
        self._rejected: Counter[str] = Counter()
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "arrival to first output token", _TTFT_S)
        self._itl = Histogram("vllm:inter_token_latency_seconds", "gap between two output tokens", _TOKEN_GAP_S)
        self._requests = _RequestHistograms(config.max_model_len)
        self._iteration = Histogram("vllm:iteration_tokens_total", "tokens computed in a step", _ITERATION_TOKENS)
        self._padding_efficiency = Histogram("headway:step_padding_efficiency", _PADDING_HELP, _SHARES)
        self._utilization = Histogram(
            "headway:batch_utilization", "sequences of a step / those that can run together", _SHARES
        )

    def rejected(self, reason: str) -> None:
        """Count a request that was refused because of the queue limit `reason`."""
        self._rejected[reason] += 1

    def scheduled(self, batch: ScheduledBatch, now: float) -> None:
        """Count the sequences scheduled for the first time, and stamp their timings."""
        columns = batch.columns
        for sequence in columns.sequences[columns.num_decodes :]:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
                self._tokens["prompt"] += sequence.num_prompt_tokens
                self._tokens["cached"] += sequence.num_cached_tokens or 0
                if self._config.enable_prefix_caching and not sequence.request.params.needs_whole_prompt:
                    self._tokens["looked up"] += sequence.num_prompt_tokens

    def stepped(self, step: CollectedStep, table: SequenceTable) -> None:
        """Count the tokens of a step. Called before the results are applied."""
        columns = step.batch.columns
        num_items, num_tokens = len(columns.sequences), step.batch.num_tokens
        token_s = step.duration_s / num_tokens
        rows, num_of_rows, is_running = columns.rows, columns.num_tokens, table.has(columns)
        num_sampled = np.count_nonzero(columns.samples & is_running)
        gone = (~is_running).nonzero()[0].tolist()
        if gone:
            rows, num_of_rows = rows[is_running], num_of_rows[is_running]
        work, device_s = table.numbers[WORK], table.times[DEVICE_S]
        work[rows] += num_of_rows
        device_s[rows] += num_of_rows * token_s
        for index in gone:
            # It was preempted or ended while the step was in flight.
            sequence, num_of_item = columns.sequences[index], columns.num_tokens.item(index)
            sequence.add_work(num_of_item, num_of_item * token_s)
            num_sampled += columns.samples[index] and sequence.status is not SequenceStatus.FINISHED
            self.tenant_usage.add(sequence.request.tenant, sequence.request.band, num_of_item)
        for (tenant, band), num_served in table.accounts.sums(rows, num_of_rows):
            self.tenant_usage.add(tenant, band, num_served)
        self.rate.step(step.duration_s, int(num_sampled))
        if step.is_saturated:
            self.saturated_rate.step(step.duration_s, num_tokens)
        self._iteration.observe(num_tokens)
        most_tokens = 1 if num_tokens == num_items else int(columns.num_tokens.max())
        self._padding_efficiency.observe(num_tokens / (num_items * most_tokens))
        self._utilization.observe(num_items / self._config.num_slots)
        computed = step.computed.columns
        for index in computed.num_recomputed_tokens.nonzero()[0].tolist():
            sequence, num_recomputed = computed.sequences[index], computed.num_recomputed_tokens.item(index)
            sequence.recomputed_tokens += num_recomputed
            cause = WasteCause.FAIRNESS if sequence.is_fairness_preempted else WasteCause.PREEMPT
            self._wasted[cause] += num_recomputed

    def continued(self, times: np.ndarray, rows: np.ndarray, now: float) -> None:
        """Count a token for each of the columns `rows`, which have had one before, and stamp their `times`."""
        self._tokens["generation"] += len(rows)
        self._itl.observe_all(now - times[LAST_TOKEN_S, rows])
        times[LAST_TOKEN_S, rows] = now

    def followed(self, num_undecodable: int, num_forced: int) -> None:
        """Count the tokens that constraints force after the counted ones, of which some cannot be decoded."""
        self._tokens["generation"] += num_forced - num_undecodable
        self._tokens["forced"] += num_forced

    def produced(self, sequence: Sequence, now: float, num_tokens: int) -> None:
        """Count the output tokens that a step gives a sequence: one is sampled, its constraint forces the others.

        A token that cannot be decoded is none of them. The sequence's timings are stamped.
        """
        self._tokens["generation"] += num_tokens
        self._tokens["forced"] += max(0, num_tokens - 1)
        if sequence.last_token_s is not None:
            self._itl.observe(now - sequence.last_token_s)
        else:
            sequence.first_token_s = now
            if not sequence.request.output_token_ids:
                self._ttft.observe(now - sequence.arrival_s)
        sequence.last_token_s = now
        if sequence.phases.phase is Phase.PREFILL:
            sequence.enter_phase(Phase.DECODE, now)

    def expired(self, sequence: Sequence) -> None:
        """Count the tokens computed for a sequence whose deadline has passed."""
        self._wasted[WasteCause.EXPIRED] += sequence.num_spent_tokens

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Count a sequence that ends. Called before its blocks are freed."""
        self._finished[reason] += 1
        if reason is FinishReason.ABORT:
            self._wasted[WasteCause.ABORT] += sequence.num_spent_tokens
        elif reason is not FinishReason.ERROR:
            self._wasted[WasteCause.SURPLUS] += sequence.num_surplus_tokens
        self._requests.observe(sequence, now)

    def histograms(self) -> tuple[HistogramMetric, ...]:
        """Return every distribution so far."""
        of_steps = (self._ttft, self._itl, self._iteration, self._padding_efficiency, self._utilization)
        return tuple(histogram.snapshot() for histogram in (*of_steps, *vars(self._requests).values()))

    def counters(self, num_preemptions: int) -> tuple[Metric, ...]:
        """Return every counter so far; `num_preemptions` is the scheduler's."""
        tokens = self._tokens
        computed = tokens["prompt"] - tokens["cached"]
        return (
            _counter("vllm:prompt_tokens", "prompt tokens of scheduled requests", tokens["prompt"]),
            _counter("vllm:prompt_tokens_cached", "prompt tokens found in the prefix cache", tokens["cached"]),
            _counter("vllm:generation_tokens", "output tokens", tokens["generation"]),
            _counter("headway:forced_tokens", "output tokens that grammars forced, without sampling", tokens["forced"]),
            _counter("vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache", tokens["looked up"]),
            _counter("vllm:prefix_cache_hits", "prompt tokens found in the prefix cache", tokens["cached"]),
            _counter("vllm:num_preemptions", "sequences preempted to be recomputed", num_preemptions),
            *(
                _counter("vllm:prompt_tokens_by_source", "prompt tokens by where they came from", value, source=source)
                for source, value in (("local_compute", computed), ("local_cache_hit", tokens["cached"]))
            ),
            *(
                _counter("vllm:request_success", "requests ended", self._finished[reason], finished_reason=reason.value)
                for reason in FinishReason
            ),
            *(
                _counter("headway:engine_refusals", _REFUSALS_HELP, self._rejected[reason], reason=reason)
                for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
            ),
            *(
                _counter("headway:wasted_tokens", _WASTE_HELP, self._wasted[cause], cause=cause.value)
                for cause in WasteCause
            ),
        )


def gauge(name: str, help_text: str, value: float, **labels: str) -> Metric:
    """Return a gauge metric, whose value goes up and down."""
    return Metric(name, help_text, MetricKind.GAUGE, value, tuple(labels.items()))


def _counter(name: str, help_text: str, value: float, **labels: str) -> Metric:
    return Metric(name, help_text, MetricKind.COUNTER, value, tuple(labels.items()))
