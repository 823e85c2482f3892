"""Values that cross between the ingress and a replica: frozen, without behaviour beyond merging.

With them are the rules that both apply alike: the fair share of a replica's slots, and the blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

from replicas.errors import ServingError

ItemT = TypeVar("ItemT")
_UNBOUNDED_TOKENS = 2**31 - 1


class Band(IntEnum):
    """Urgency class of a request; lower is more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


BANDS = tuple(Band)
"""All bands. To iterate over an enumeration takes several times as long."""


class Auto(Enum):
    """Value of a setting that stands for what suits the device."""

    AUTO = "auto"


class FinishReason(Enum):
    """Reason for the end of a sequence. The values are OpenAI's terms; `abort` and `error` are vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(Enum):
    """Rule by which the hidden states of a text become one vector."""

    LAST = "last"
    """State of the last token. It needs no other state, so a cached prefix is reused."""
    FIRST = "first"
    """State of the first token."""
    MEAN = "mean"
    """Mean of the states of all tokens."""


class PoolTask(Enum):
    """Use of a pooled vector."""

    EMBED = "embed"
    """The vector is the answer."""
    SCORE = "score"
    """A head makes scores of the vector."""


@dataclass(frozen=True, slots=True)
class PoolParams:
    """Parameters of a request whose output is pooled, and not generated."""

    task: PoolTask
    pooling: Pooling
    dimensions: int | None = None
    """Number of the first numbers of an embedding that are kept; None: all."""


@dataclass(frozen=True, slots=True)
class PoolCard:
    """Description of the pooled outputs of a model."""

    task: PoolTask
    pooling: Pooling
    num_outputs: int
    """Numbers in an embedding, or scores of a text."""
    max_tokens: int | None = None
    """Most tokens of a text, by the checkpoint; None: as many as the model takes."""
    can_shorten: bool = False
    """True if the first numbers of an embedding are an embedding, too (Matryoshka)."""
    dimensions: tuple[int, ...] = ()
    """Numbers of dimensions to which an embedding may be shortened; empty: all."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Texts that go before a text, with their names."""
    default_prompt: str | None = None
    """Name of the text that goes there if a request names none."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Bias that is added to the logit of one token before sampling."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling, validated in the ingress; names and meanings are vLLM's and OpenAI's."""

    max_tokens: int
    """Most output tokens: at least 1, or 0 together with `prompt_logprobs` (echo without generation) or `pool`."""
    temperature: float = 1.0
    """Temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Seed of the sampling, the only source of randomness. The ingress draws one if the client gave none."""
    min_tokens: int = 0
    """Number of output tokens before which no stop token is sampled and no stop string is searched."""
    stop: tuple[str, ...] = ()
    """Stop strings. The text ends before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[LogitBias, ...] = ()
    logprobs: int | None = None
    """Number k of most probable tokens whose log probabilities are returned beside the chosen token's. None: none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. A request with it reuses no cached prefix."""
    grammar: str | None = None
    """Grammar of the output in llguidance's variant of Lark; None: any output."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last token is never sampled behind the others."""
    skip_special_tokens: bool = True
    """True if special tokens have no text, other than the visible ones."""
    visible_special_token_ids: tuple[int, ...] = ()
    pool: PoolParams | None = None
    """Pooling of the prompt's hidden states, which is the output; None: tokens are."""

    @property
    def needs_whole_prompt(self) -> bool:
        """True if every token of the prompt must be computed, so that no cached prefix is reused."""
        return self.prompt_logprobs is not None or (self.pool is not None and self.pool.pooling is not Pooling.LAST)

    @property
    def is_constrained(self) -> bool:
        """True if not every output is allowed."""
        return self.grammar is not None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for one sequence, already validated.

    Four ids are called `request_id` on the way of a request:

        id                           example          made by
        `Exchange.request_id`        my-id            the client (`x-request-id`), else the ingress; need not be unique
        `Caller.request_id`          cmpl-9f3c        the ingress: a prefix of the endpoint and its own unique id
        `GenerateRequest.request_id` cmpl-9f3c-0      the ingress: the caller's id and the index of the sequence
        the same in the engine       cmpl-9f3c-0#7    `AsyncEngine`: that id and the number of the stream on the replica

    Invariants: 1 <= len(prompt_token_ids); len(prompt_token_ids) + max_tokens <= max_model_len.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    band: Band = Band.STANDARD
    tenant: str = "anonymous"
    arrival_unix_s: float | None = None
    """Time at which the ingress received the request, unix seconds; None: the time at which the engine gets it."""
    deadline_unix_s: float | None = None
    """Time after which no engine step is spent on the request, unix seconds; None: no deadline."""
    expected_output_tokens: int | None = None
    """Output length that the ingress predicts from the tenant's earlier requests; None: `max_tokens`."""
    affinity_key: str | None = None
    """Key whose requests prefer one replica (OpenAI's `prompt_cache_key`)."""
    cache_salt: str | None = None
    """Salt of the prefix cache: requests with different salts share no block. None: no salt."""
    output_token_ids: tuple[int, ...] = ()
    """Output that other replicas have already generated. Generation continues behind it, as on one replica."""
    is_promoted: bool = False
    """True if the request was dispatched because its band had starved: it takes the next free slot, and keeps it."""
    is_isolated: bool = False
    """True if the request must run alone, as it was on two replicas when they died."""
    ingress_id: str = ""
    """Ingress that sends the request; the replica's reports count the sequences of each."""
    delta_interval_s: float | None = None
    """Time between two deltas after the first, seconds, for a request that is not streamed. Fewer deltas cost less to
    carry, and those of a batch request also wait a little so that several leave together. None: the replica's flush
    policy for streams."""

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens that the sequence has at its start: the prompt, and other replicas' output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens, prompt and output, that the sequence can have."""
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token at one position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities at one position: of the token at it, and of the most probable tokens, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Usage(NamedTuple):
    """Token counts of one sequence so far; a named tuple, as `TokenDelta` is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were in the prefix cache when the sequence was first scheduled."""
    computed_tokens: int = 0
    """Tokens that this replica computed for the sequence, prompt and output, each as often as it did."""
    recomputed_tokens: int = 0
    """Tokens among these that it computed again after a preemption."""
    device_s: float = 0.0
    """Share of the replica's computing time, seconds: a step's time is divided among its sequences by their tokens."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Identity of a replica: its id, node and process."""

    replica_id: str
    node_id: str
    pid: int
    weights_id: str = ""
    """Digest of the model's weights; replicas with the same one give the same tokens."""


@dataclass(frozen=True, slots=True)
class TenantTokens:
    """Tokens, prompt and output, computed for one tenant in one band."""

    tenant: str
    band: Band
    tokens: int


@dataclass(frozen=True, slots=True)
class IngressShare:
    """Part of a replica's load: the sequences that one ingress sent."""

    ingress_id: str
    num_by_band: tuple[int, ...]
    """Sequences among the running and the waiting ones, each in the band in which `ReplicaStats` counts it."""
    outstanding_tokens: int
    """Tokens still to compute for them."""


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """Rule by which the most blocks of a sequence follow from its tokens, and the other way round.

    The layers of a model are cut into groups, and a sequence has a block table for each. Layers with a window need the
    last tokens alone, so their tables stop growing.
    """

    block_size: int
    num_whole_tables: int = 1
    """Tables with blocks for all tokens."""
    most_window_blocks: tuple[int, ...] = ()
    """Most blocks in each table of layers with a window."""

    @property
    def num_tables(self) -> int:
        """Number of block tables of a sequence."""
        return self.num_whole_tables + len(self.most_window_blocks)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the most blocks, in all tables together, that a sequence of `num_tokens` holds at a time."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self.most_window_blocks:
            return self.num_whole_tables * num_blocks
        return self.num_whole_tables * num_blocks + sum(min(num_blocks, most) for most in self.most_window_blocks)

    def num_tokens(self, num_blocks: int) -> int:
        """Return the most tokens of one sequence that `num_blocks` blocks hold."""
        num_tables = self.num_tables
        for most in sorted(self.most_window_blocks):
            if num_blocks // num_tables < most:
                break
            num_blocks -= most
            num_tables -= 1
        return num_blocks // num_tables * self.block_size if num_tables else _UNBOUNDED_TOKENS


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """Load of a replica at one moment; sent with every batch of deltas and returned by a poll."""

    replica_id: str
    node_id: str
    pid: int
    taken_unix_s: float
    num_slots: int
    """Sequences that can run together (`max_num_seqs`, or less if there are few slots for recurrent state)."""
    num_blocks: int
    num_free_blocks: int
    """Blocks that no sequence holds, cached ones included."""
    num_running_by_band: tuple[int, ...]
    """Running sequences by the band they are scheduled in: a promoted one counts as interactive."""
    num_waiting_by_band: tuple[int, ...]
    """Waiting sequences by the band of their request: a promoted one counts in its own."""
    waiting_tokens: int
    """Prompt tokens plus `max_tokens` of the waiting sequences."""
    generated_tokens_per_s: float
    """Output tokens per second of computing time, over recent steps; 0 while there is no work."""
    is_draining: bool
    num_held_blocks_by_band: tuple[int, ...] = (0, 0, 0)
    """Blocks in the running sequences' tables, by the band they are scheduled in; a shared block counts for each."""
    outstanding_tokens: int = 0
    """Tokens still to compute: the known ones of all sequences, and their expected output."""
    by_ingress: tuple[IngressShare, ...] = ()
    """Parts of the sequences and of `outstanding_tokens` by the ingress that sent them."""
    saturated_tokens_per_s: float = 0.0
    """Speed of the replica under load: tokens computed per second, prompt and output, over recent saturated steps. A
    step is saturated if sequences wait, every slot is taken or its token budget is used up. 0 before the first."""
    block_size: int = 16
    """Tokens in a block of the KV cache."""
    stalled_s: float = 0.0
    """Seconds since the engine thread last reported, while sequences wait or run; in polled stats only."""
    served_tokens: tuple[TenantTokens, ...] = ()
    """Tokens computed since the replica started, for the tenants served last; in polled stats only."""
    weights_id: str = ""
    """Digest of the model's weights."""
    tpot_targets_s: tuple[float | None, ...] = (None, None, None)
    """Present target of each band for the mean time between two tokens of a stream, seconds; None: there is none."""
    version: int = 0
    """Number of the engine's last change. Reports of a replica with one version differ in times alone. 0: no number is
    known."""
    num_state_slots: int = 0
    """Slots for recurrent state; 0: the model has none."""
    num_free_state_slots: int = 0
    """State slots that no sequence holds, cached ones included."""
    num_whole_tables: int = 1
    """Block tables of a sequence with blocks for all its tokens."""
    most_window_blocks: tuple[int, ...] = ()
    """Most blocks in each block table of layers with a window."""

    @property
    def num_running(self) -> int:
        """Number of sequences in the running batch."""
        return sum(self.num_running_by_band)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the engine's waiting queue."""
        return sum(self.num_waiting_by_band)

    def num_tokens(self, num_blocks: int) -> int:
        """Return the most tokens of one sequence that `num_blocks` blocks hold."""
        if self.num_whole_tables == 1 and not self.most_window_blocks:
            return num_blocks * self.block_size
        blocks = SequenceBlocks(self.block_size, self.num_whole_tables, self.most_window_blocks)
        return blocks.num_tokens(num_blocks)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that are held by sequences, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    @property
    def state_slot_usage(self) -> float:
        """Share of the state slots that are held by sequences, 0 to 1."""
        return 1.0 - self.num_free_state_slots / self.num_state_slots if self.num_state_slots else 0.0


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Time that a sequence has spent in each phase on one replica so far, seconds; they add up to its time there."""

    waiting_s: float = 0.0
    """In the engine's queue, before the first step that computed it."""
    prefill_s: float = 0.0
    """From its (re)admission to the running batch to its next token."""
    decode_s: float = 0.0
    preempted_s: float = 0.0
    """In the engine's queue after a preemption."""
    num_preemptions: int = 0

    @property
    def total_s(self) -> float:
        """Time since the engine accepted the sequence, seconds."""
        return self.waiting_s + self.prefill_s + self.decode_s + self.preempted_s


class TokenDelta(NamedTuple):
    """Output of a sequence since its last delta; a named tuple, which is made in less time than a dataclass.

    Token indices are contiguous over a sequence's deltas. Exactly one delta, the last, has a finish reason; `error` is
    set if and only if that reason is ERROR. `text` may lag behind `token_ids`, since incomplete characters and possible
    stop strings are held back. It is complete with the last delta.
    """

    request_id: str
    start: int
    """Index of the first of `token_ids` among the sequence's output tokens."""
    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Log probabilities, one entry per token id; empty if the request did not ask for them."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Log probabilities of prompt tokens 1, 2, ... in order, spread over the first deltas."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended the sequence, if one did; None for EOS."""
    error: ServingError | None = None
    stats: ReplicaStats | None = None
    phases: PhaseSeconds | None = None
    """Times of the sequence up to this delta: in the first delta of a replica, the first after a preemption and the
    last."""
    pooled: bytes = b""
    """Pooled output in float32, little-endian, in the only delta of a request for one."""


_NO_MORE = tuple(TokenDelta._field_defaults.values())
"""Fields of a delta after its usage, if it has text alone."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Description of the model that a replica serves, and of its limits; constant over the replica's life."""

    model_id: str
    """Directory or hub id from which the model was loaded."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output."""
    vocab_size: int
    block_size: int
    num_blocks: int
    num_longest: float
    """Sequences of `max_model_len` tokens that the KV cache holds."""
    max_num_seqs: int
    dtype: str
    device: str
    kernels: str = ""
    """Kernels that compute attention; empty: not known."""
    weights: str = ""
    """Format of the weights in the checkpoint and in memory; empty: not known."""
    cache_dtype: str = ""
    """Number format of the KV cache; empty: not known."""
    notes: tuple[str, ...] = ()
    """Faults of the checkpoint with which the model is served all the same, a sentence each."""
    pool: PoolCard | None = None
    """Pooled outputs; None: the model has no pooling."""
    generates: bool = True
    """True if the model generates tokens."""


class MetricKind(Enum):
    """Prometheus type of a metric with a single value."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric with one value and one set of labels. `name` is without the `_total` that Prometheus adds to counters."""

    name: str
    help: str
    kind: MetricKind
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    is_mean: bool = False
    """True if the mean stands for several engines: a share or a setting. Other values are summed."""


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """Metric with a distribution: `counts[i]` observations in (bounds[i - 1], bounds[i]], the last above all bounds."""

    name: str
    help: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """All metrics of one replica's engine, independent of the exposition format."""

    replica_id: str
    metrics: tuple[Metric, ...]
    histograms: tuple[HistogramMetric, ...]


def fair_share(num_slots: int, num_tenants: int) -> int:
    """Return the slots that each of `num_tenants` tenants keeps while others wait; at least one."""
    return max(1, num_slots // num_tenants)


def usages_of(*columns: Iterable[float]) -> list[Usage]:
    """Return usages from the columns of their fields, in less than half the time of as many calls."""
    return list(map(partial(tuple.__new__, Usage), zip(*columns, strict=True)))


def deltas_of(
    request_ids: Sequence[str], starts: Sequence[int], token_ids: Sequence[int], texts: Sequence[str],
    usages: Sequence[Usage],
) -> list[TokenDelta]:  # fmt: skip
    """Return deltas of one token each that have text alone, from the columns of their fields; see `usages_of`."""
    columns = (request_ids, starts, zip(token_ids), texts, usages, *map(repeat, _NO_MORE))
    return list(map(partial(tuple.__new__, TokenDelta), zip(*columns, strict=False)))  # Repetitions have no end.


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Merge successive deltas of a sequence, at least one, into one delta with the same contents. Associative."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    _, _, token_ids, texts, _, logprobs, prompt_logprobs, reasons, _, _, stats, phases, _ = zip(*deltas, strict=True)
    joined_ids = tuple(chain.from_iterable(token_ids))
    assert last.start - first.start == len(joined_ids) - len(last.token_ids) and not any(reasons[:-1])
    return TokenDelta(
        first.request_id,
        first.start,
        joined_ids,
        "".join(texts),
        last.usage,
        tuple(chain.from_iterable(logprobs)),
        tuple(chain.from_iterable(prompt_logprobs)),
        last.finish_reason,
        last.stop_reason,
        last.error,
        next(filter(None, reversed(stats)), None),
        next(filter(None, reversed(phases)), None),
        last.pooled,
    )
