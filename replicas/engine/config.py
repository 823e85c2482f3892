"""The engine's limits. vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KVPressurePolicy(Enum):
    """What gives way when KV blocks run short."""

    PREEMPT = "preempt"
    """Admit as soon as a prompt fits; when blocks run out, the least urgent sequence is recomputed later."""
    PAUSE_NEW = "pause_new"
    """Admit only what can run to its `max_tokens` beside the running: growth preempts nothing. A more urgent
    band still takes blocks from a lower one."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine; cross-field rules raise on construction."""

    num_blocks: int
    """KV blocks that sequences can hold. The runner keeps one more, block 0, as scratch: ids are 1..num_blocks."""
    max_model_len: int
    """Most tokens (prompt + output) of one sequence."""
    block_size: int = 16
    """Token slots in a block."""
    max_num_seqs: int = 32
    """Sequences that run together."""
    max_num_batched_tokens: int = 512
    """Tokens computed in one step, at most."""
    target_itl_ms: float | None = None
    """Milliseconds between two tokens of a sequence to aim at: steps in which sequences decode compute fewer prompt
    tokens, down to none, to keep within 20 % of it. None: `max_num_batched_tokens` is the only limit."""
    max_num_partial_prefills: int = 2
    """Prompts that may share a step's token budget without finishing in it. All but one of these places
    (where there are two or more) may be taken by prompts longer than the budget, so that short ones always
    find one; more urgent prompts pause less urgent ones part-way."""
    enable_prefix_caching: bool = True
    """Reuse full computed blocks between sequences that start with the same tokens."""
    kv_pressure_policy: KVPressurePolicy = KVPressurePolicy.PREEMPT
    max_queued_requests: int = 1024
    """Waiting sequences, beyond those that find a free slot, at which a request is refused."""
    max_queued_tokens: int = 4_000_000
    """Prompt + `max_tokens` of the waiting sequences at which a request that finds no free slot is refused."""
    promote_after_s: float = 30.0
    """A band that waits and for which nothing was computed this long, seconds, has one sequence promoted: it
    takes the next free slot and keeps it."""
    async_scheduling: bool = False
    """Schedule and launch a step before the results of the one before are known, so that the device never waits for
    the host. Worth it only where device and host are two: on CUDA."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence unless it says `ignore_eos`."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_partial_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.target_itl_ms is not None and self.target_itl_ms <= 0:
            raise ValueError(f"target_itl_ms is {self.target_itl_ms}; it must be above 0, or None")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed max_num_seqs "
                f"({self.max_num_seqs}), or no prompt could begin while all running sequences decode"
            )
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) exceeds the KV cache of {self.num_blocks} blocks x "
                f"{self.block_size} = {self.num_blocks * self.block_size} tokens; "
                "lower max_model_len or give the cache more memory"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
