"""Limits of the engine, with vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

from replicas.protocol import BANDS, Auto, SequenceBlocks
from replicas.settings import check_bounds, setting

LOWERED_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
"""Limits that follow the size of the KV cache where they are not chosen."""
GPU_SEQS, GPU_BATCHED_TOKENS = 256, 2048
"""Defaults of `max_num_seqs` and `max_num_batched_tokens` with a GPU, with which an H200 was measured."""
_LEAST_SEQ_TOKENS = 128
"""Tokens of the KV cache for each of so many sequences as run together: about those of a short request. With fewer,
most sequences would be preempted before their end."""


class KVPressurePolicy(Enum):
    """Policy for a shortage of KV blocks."""

    PREEMPT = "preempt"
    """Admit a sequence as soon as its prompt fits. When blocks run out, preempt the least urgent one; it is recomputed
    later."""
    PAUSE_NEW = "pause_new"
    """Admit a sequence only if it and all running ones can reach their `max_tokens`, so growth preempts none. A more
    urgent band still takes blocks from a lower one."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine that do not depend on the model; cross-field rules raise on construction."""

    block_size: int = setting(16, ge=1)
    """Tokens in one block of the KV cache."""
    max_num_seqs: int = setting(32, ge=1)
    """Most sequences that run together in one replica. With a GPU the default is 256, or as many as the KV cache has
    128 tokens for."""
    max_num_batched_tokens: int = setting(512, ge=1)
    """Most tokens that one engine step computes. Less makes decodes smoother and prefills slower. With a GPU the
    default is 2,048, or the tokens of the KV cache."""
    target_itl_ms: float | None = setting(None, gt=0)
    """Target for the time between two tokens of a stream, milliseconds. Steps in which sequences decode compute fewer
    prompt tokens, down to none, to stay within 20 % of it. None: only `max_num_batched_tokens` limits them."""
    max_num_partial_prefills: int = setting(2, ge=1)
    """Most prompts of one replica that are part-way through their prefill. Prompts longer than a step take all but one
    of these places, so a short prompt always finds one. More urgent prompts pause less urgent ones."""
    enable_prefix_caching: bool = setting(True)
    """true: sequences that start with the same tokens share their full KV blocks; false: each computes its own."""
    kv_pressure_policy: KVPressurePolicy = setting(KVPressurePolicy.PREEMPT)
    """Reaction to a shortage of KV blocks: `preempt` recomputes the least urgent sequence later; `pause_new` admits
    only sequences that can run to their `max_tokens`."""
    async_scheduling: bool | None = setting(None)
    """Schedule and launch a step before the tokens of the previous step are known. None: only with a GPU."""
    max_step_s: float = setting(8.0, gt=0)
    """Seconds after which a step that has not ended counts as hung: the replica's streams go on elsewhere and the
    replica is replaced. Never before 4 times the longest step so far; with a GPU the first 16 steps, which may compile
    kernels, have at least 30 s."""
    max_queued_requests: int = 1024
    """Most waiting sequences beyond those that find a free slot; a request above it is refused."""
    max_queued_tokens: int = 4_000_000
    """Most tokens, prompt + `max_tokens`, of the waiting sequences. Above it a request is refused, unless it finds a
    free slot."""
    promote_after_s: float = 30.0
    """Seconds without computed tokens after which a waiting band has one sequence promoted. The promoted sequence takes
    the next free slot and keeps it."""
    tpot_targets_s: tuple[float | Auto | None, ...] = (None,) * len(BANDS)
    """Target of each band for the mean time between two tokens of a stream, seconds, or `auto`. While a band's streams
    exceed it, less urgent bands get fewer tokens in a step. None: no target."""
    fairness_rest_steps: int = 64
    """Fewest steps between two preemptions of one sequence for other tenants' fair shares."""
    lowered: frozenset[str] = frozenset()
    """Names of the limits, of `LOWERED_LIMITS`, that are lowered until the KV cache holds them."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed max_num_seqs "
                f"({self.max_num_seqs}), or no prompt could begin while all running sequences decode"
            )

    def held_by(self, num_blocks: int) -> Self:
        """Return these limits, with those of `lowered` so low that `num_blocks` blocks hold them.

        The blocks hold the tokens of a step, and 128 tokens of each sequence. If there is no block at all, since steps
        of this size take the memory, the limits are halved.
        """
        num_tokens = num_blocks * self.block_size
        most_seqs, most_tokens = num_tokens // _LEAST_SEQ_TOKENS, num_tokens
        if num_blocks < 1:
            most_seqs, most_tokens = self.max_num_seqs // 2, self.max_num_batched_tokens // 2
        max_seqs, max_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if "max_num_seqs" in self.lowered:
            max_seqs = max(1, min(max_seqs, most_seqs))
        if "max_num_batched_tokens" in self.lowered:
            max_tokens = max(max_seqs + 1, min(max_tokens, most_tokens))
        return replace(self, max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens)


def state_slots_per_sequence(*, is_asynchronous: bool) -> int:
    """Return the number of state slots that one sequence may need: those of each step in flight, and one more."""
    return 3 if is_asynchronous else 2


def sequence_blocks(limits: EngineLimits, windows: tuple[int | None, ...], *, is_asynchronous: bool) -> SequenceBlocks:
    """Return the blocks that a sequence holds by its length, in tables with `windows`.

    A windowed table has blocks for the window, for the tokens of each step in flight, and for those of the next step.
    """
    num_ahead = limits.max_num_batched_tokens * (2 if is_asynchronous else 1)
    return SequenceBlocks(
        limits.block_size,
        windows.count(None),
        tuple(1 - (1 - window - num_ahead) // limits.block_size for window in windows if window is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineLimits):
    """Limits of one engine, complete with those of its model, its KV cache and its device."""

    tpot_targets_s: tuple[float | None, ...] = (None,) * len(BANDS)
    """Target of each band, seconds; 0: as low as `TpotController` allows."""
    num_blocks: int
    """KV blocks that sequences can hold, with ids 1..num_blocks. Block 0 is the runner's scratch block."""
    windows: tuple[int | None, ...] = (None,)
    """Window of each block table of a sequence, in tokens; None: its layers see all tokens. Those are the last ones."""
    num_state_slots: int = 0
    """Slots for recurrent state, with ids 1..num_state_slots. Slot 0 is the runner's scratch slot. 0: the model has no
    recurrent state."""
    max_model_len: int
    """Most tokens (prompt + output) of one sequence."""
    async_scheduling: bool = False
    """Schedule and launch a step before the tokens of the previous step are known."""
    counts_on_device: bool = False
    """The runner counts the tokens of sequences on its device, so that penalties need none of them on the host."""
    cache_dtype: str = ""
    """Number format of the KV cache, for its metric; empty: not known."""
    vocab_size: int
    """Tokens that the model has, with ids 0..vocab_size - 1. A request with any other id is refused."""
    whole_prompts: bool = False
    """A prompt is computed in one step or not at all, since its tokens see those behind them. No prefix is reused."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence unless it says `ignore_eos`."""

    def __post_init__(self) -> None:
        EngineLimits.__post_init__(self)
        for name in ("num_blocks", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.windows != tuple(sorted(self.windows, key=lambda window: window is None)):
            raise ValueError(f"windows is {self.windows}; tables without a window must be the last ones")
        blocks = self.sequence_blocks
        if blocks.num_blocks(self.max_model_len) > self.num_blocks:
            size = f"{self.block_size}"
            if blocks.num_tables > 1:
                size = f"{self.block_size} tokens in {blocks.num_tables} tables"
            raise ValueError(
                f"max_model_len ({self.max_model_len}) exceeds the KV cache of {self.num_blocks} blocks x "
                f"{size} = {blocks.num_tokens(self.num_blocks)} tokens; "
                "lower max_model_len or give the cache more memory"
            )
        if 0 < self.num_state_slots < self.state_slots_per_sequence:
            raise ValueError(
                f"the cache has {self.num_state_slots} slots for recurrent state; one sequence needs "
                f"{self.state_slots_per_sequence}; give the cache more memory"
            )

    @property
    def state_slots_per_sequence(self) -> int:
        """Number of state slots that one sequence may need."""
        return state_slots_per_sequence(is_asynchronous=self.async_scheduling)

    @property
    def num_slots(self) -> int:
        """Number of sequences that can run together: `max_num_seqs`, or less if there are few state slots."""
        if not self.num_state_slots:
            return self.max_num_seqs
        return min(self.max_num_seqs, self.num_state_slots // self.state_slots_per_sequence)

    @property
    def sequence_blocks(self) -> SequenceBlocks:
        """Blocks that a sequence holds by its length."""
        return sequence_blocks(self, self.windows, is_asynchronous=self.async_scheduling)
