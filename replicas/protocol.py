"""What crosses between the ingress and a replica: frozen values, no behaviour beyond merging."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import chain, pairwise
from typing import TypeVar

from replicas.errors import ServingError

ItemT = TypeVar("ItemT")


class Band(IntEnum):
    """Urgency class of a request; lower is more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class FinishReason(Enum):
    """Why a sequence ended. The values are OpenAI's words (`abort` and `error` are vLLM's)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Add `bias` to the logit of one token before sampling."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose output tokens. Validated at the edge; vLLM's and OpenAI's meanings."""

    max_tokens: int
    """Most output tokens; >= 1, or 0 only together with `prompt_logprobs` (echo without generation)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Always set (the ingress draws one where the client gave none): output is a function of it alone."""
    min_tokens: int = 0
    """Stop tokens cannot be sampled, and stop strings are not looked for, before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings; the text ends before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[LogitBias, ...] = ()
    logprobs: int | None = None
    """None: none. k >= 0: the chosen token's log probability and those of the k likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first; such a request takes no prefix hit."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One valid sequence to generate.

    Invariants: 1 <= len(prompt_token_ids); len(prompt_token_ids) + max_tokens <= max_model_len.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    band: Band = Band.STANDARD
    tenant: str = "anonymous"
    arrival_unix_s: float | None = None
    """When the ingress received the request, unix seconds; None: when the engine gets it."""
    deadline_unix_s: float | None = None
    """No engine step is spent on the request after this moment, unix seconds."""
    expected_output_tokens: int | None = None
    """What the ingress expects of it, from what the tenant's requests came to before; None: `max_tokens`."""
    affinity_key: str | None = None
    """Requests with one key prefer one replica (OpenAI's `prompt_cache_key`)."""
    output_token_ids: tuple[int, ...] = ()
    """Output that another replica has already given; generation goes on behind it, as if it had never moved."""
    is_promoted: bool = False
    """It was dispatched because its band had starved: it takes the next free slot, and keeps it."""
    is_isolated: bool = False
    """Nothing else runs beside it: it was there when two replicas died."""
    delta_interval_s: float | None = None
    """Nobody reads its deltas one by one: those after the first are put together for so long, seconds, which spares
    everybody the work of carrying them. None: as the replica does for streams."""

    @property
    def max_total_tokens(self) -> int:
        """Most tokens, prompt and output, that the sequence may come to hold."""
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token at one position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities at one position: of the token that stands there, and of the likeliest, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache when the sequence was first scheduled."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Which replica, and where it runs."""

    replica_id: str
    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class TenantTokens:
    """Tokens (prompt and output) that one tenant has had in one band."""

    tenant: str
    band: Band
    tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica holds at one moment; attached to every delta and returned by a poll."""

    replica_id: str
    node_id: str
    pid: int
    taken_unix_s: float
    num_slots: int
    """Sequences that can run together (`max_num_seqs`)."""
    num_blocks: int
    num_free_blocks: int
    """Blocks nobody holds, cached ones included."""
    num_running_by_band: tuple[int, ...]
    """By the band they are scheduled in: a promoted sequence counts as interactive."""
    num_waiting_by_band: tuple[int, ...]
    waiting_tokens: int
    """Prompt and output tokens that the waiting sequences may still come to need."""
    generated_tokens_per_s: float
    """Output tokens a second, measured over recent steps that had work."""
    is_draining: bool
    num_held_blocks_by_band: tuple[int, ...] = (0, 0, 0)
    """Blocks in the running sequences' tables, a shared one counted for each."""
    outstanding_tokens: int = 0
    """Tokens still to compute: known ones of all sequences, and the output expected of them."""
    saturated_tokens_per_s: float = 0.0
    """Tokens computed a second (prompt and output) over recent steps in which every slot was taken or something
    waited: what this replica can do, where `generated_tokens_per_s` is what was asked of it. 0 before the first."""
    block_size: int = 16
    """Token slots in a block."""
    stalled_s: float = 0.0
    """While sequences wait or run: seconds since the engine thread was last heard of; in polled stats only."""
    served_tokens: tuple[TenantTokens, ...] = ()
    """Tokens computed for the tenants served last, since the replica began; in polled stats only, not in deltas'."""

    @property
    def num_running(self) -> int:
        """Sequences in the running batch."""
        return sum(self.num_running_by_band)

    @property
    def num_waiting(self) -> int:
        """Sequences in the engine's waiting queue."""
        return sum(self.num_waiting_by_band)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What a sequence produced since its last delta.

    Token indices are contiguous over a sequence's deltas. Exactly one delta, the last,
    has a finish reason; `error` is set if and only if that reason is ERROR. `text` may lag
    behind `token_ids` (half characters and possible stop strings are held back) and is
    complete on the last delta.
    """

    request_id: str
    start: int
    """Index of the first of `token_ids` among the sequence's output tokens."""
    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One per token id where the request asked for them, otherwise empty."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """For prompt tokens 1, 2, ... in order, spread over the first deltas."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sequence, if one did (EOS: None)."""
    error: ServingError | None = None
    stats: ReplicaStats | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a replica serves and accepts; constant over its life."""

    model_id: str
    """The directory or hub id it was loaded from."""
    max_model_len: int
    """Most tokens (prompt + output) of one sequence."""
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    dtype: str
    device: str


class MetricKind(Enum):
    """Prometheus metric types of a single value."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One value under one set of labels. `name` is without the `_total` that Prometheus adds to counters."""

    name: str
    help: str
    kind: MetricKind
    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """A distribution: `counts[i]` observations in (bounds[i - 1], bounds[i]], the last above all bounds."""

    name: str
    help: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Everything one replica's engine counts, ready for any exposition format."""

    replica_id: str
    metrics: tuple[Metric, ...]
    histograms: tuple[HistogramMetric, ...]


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """The one delta that says what successive deltas of a sequence say; at least one. Associative."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    for earlier, later in pairwise(deltas):
        assert earlier.finish_reason is None and later.start == earlier.start + len(earlier.token_ids)
    return TokenDelta(
        request_id=first.request_id,
        start=first.start,
        token_ids=_joined(delta.token_ids for delta in deltas),
        text="".join([delta.text for delta in deltas]),
        usage=last.usage,
        logprobs=_joined(delta.logprobs for delta in deltas),
        prompt_logprobs=_joined(delta.prompt_logprobs for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        stats=next((delta.stats for delta in reversed(deltas) if delta.stats is not None), None),
    )


def _joined(parts: Iterable[tuple[ItemT, ...]]) -> tuple[ItemT, ...]:
    return tuple(chain.from_iterable(parts))
