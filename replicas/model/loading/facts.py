"""Facts about a model that the check by transformers finds out, and what follows from them. The module needs no torch.

`check_model` writes the facts; a start compares the settings with them before a replica loads anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from replicas.engine.config import EngineLimits, sequence_blocks, state_slots_per_sequence
from replicas.errors import ModelLoadError
from replicas.model.hardware.processor import value_bytes_on_cpu
from replicas.model.loading.options import ModelOptions, RunnerOptions

_SCALE_BYTES = 4
_STATE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one checkpoint; None: not known."""

    process_bytes: int | None
    """Memory of a process with torch, transformers and the tokenizer, without mapped files."""
    longest: int | None
    """Most tokens of a sequence for which the position encoding stays as it is."""
    kv_numbers: int | None = None
    """Numbers that one token has in the KV cache, over all layers."""
    kv_scales: int | None = None
    """Scales that one token has in a KV cache in 8 bits, over all layers."""
    state_numbers: int = 0
    """Float32 numbers of a slot for recurrent state, over all layers; 0: the model has none."""
    tail_numbers: int = 0
    """Float32 numbers that a slot has for each token of a block."""
    conv_numbers: int = 0
    """Numbers in `dtype` of the convolutions' inputs before a slot's boundary."""
    conv_channels: int = 0
    """Numbers in `dtype` of the convolutions' inputs, for each token of a block."""
    windows: tuple[int | None, ...] = (None,)
    """Window of each block table of a sequence longer than them, tokens; None: its layers see all tokens."""
    table_numbers: int | None = None
    """Numbers that one token has in the KV cache, in one of several block tables; None: there is one table."""
    table_scales: int | None = None
    """Scales that it has there in a KV cache in 8 bits; None: that has one block table for the whole length."""

    def write(self) -> str:
        """Return the facts in one line, for `read`."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the facts that `write` has written."""
        facts = json.loads(line)
        return cls(**{**facts, "windows": tuple(facts["windows"])})

    def kv_token_bytes(self, model: ModelOptions, runner: RunnerOptions) -> int | None:
        """Return the size of one token in a KV cache on CPU, in all layers, bytes."""
        return _token_bytes(self.kv_numbers, self.kv_scales, model, runner)

    def cache_bytes(
        self, model: ModelOptions, runner: RunnerOptions, limits: EngineLimits, num_tokens: int
    ) -> int | None:
        """Return the size of a KV cache on CPU for one sequence of `num_tokens`, with its scratch block, bytes."""
        token_bytes = self.kv_token_bytes(model, runner)
        windows: tuple[int | None, ...] = (None,)
        if any(window is not None and window < num_tokens for window in self.windows):
            table_bytes = _token_bytes(self.table_numbers, self.table_scales, model, runner)
            if table_bytes is not None:
                token_bytes, windows = table_bytes, self.windows
        if token_bytes is None:
            return None
        blocks = sequence_blocks(limits, windows, is_asynchronous=bool(limits.async_scheduling))
        return (blocks.num_blocks(num_tokens) + 1) * limits.block_size * token_bytes

    def state_slot_bytes(self, model: ModelOptions, limits: EngineLimits) -> int:
        """Return the size of one slot for recurrent state on CPU, bytes."""
        conv = self.conv_numbers + limits.block_size * self.conv_channels
        state = self.state_numbers + limits.block_size * self.tail_numbers
        return conv * value_bytes_on_cpu(model.dtype) + state * _STATE_BYTES

    def check_cache(self, model: ModelOptions, runner: RunnerOptions, limits: EngineLimits) -> None:
        """Check that the KV cache of a replica on CPU holds one sequence of `max_model_len` tokens, or else one block.

        Slots for recurrent state are subtracted first.

        Raises:
            ModelLoadError: it does not; the message has the least `kv_cache_bytes`.
        """
        available, beside = runner.kv_cache_bytes, ""
        if self.conv_channels:
            limit = f"kv_cache_bytes is {available}"
            num_slots = choose_state_slots(available, self.state_slot_bytes(model, limits), limits, limit)
            taken = state_bytes(num_slots, self.state_slot_bytes(model, limits))
            available -= taken
            beside = f", of which {num_slots} slots for recurrent state take {taken}"
        num_tokens = model.max_model_len or 1
        needed = self.cache_bytes(model, runner, limits, num_tokens)
        if needed is not None and available < needed:
            of_tokens = "one block" if model.max_model_len is None else f"max_model_len ({num_tokens} tokens)"
            raise ModelLoadError(
                f"kv_cache_bytes is {runner.kv_cache_bytes}{beside}; a cache for {of_tokens} needs {needed} bytes"
            )


def _token_bytes(numbers: int | None, scales: int | None, model: ModelOptions, runner: RunnerOptions) -> int | None:
    if numbers is None:
        return None
    if runner.kv_cache_dtype == "auto":
        return numbers * value_bytes_on_cpu(model.dtype)
    return None if scales is None else numbers + scales * _SCALE_BYTES


def choose_state_slots(
    available: int, slot_bytes: int, limits: EngineLimits, limit: str, *, has_gpu: bool = False
) -> int:
    """Return the number of slots for recurrent state, which take at most half of `available` bytes with a scratch slot.

    There are enough for `max_num_seqs` sequences and as many cached states, if they fit. `limit` names the limit that
    `available` follows from.

    Raises:
        ModelLoadError: the slots of one sequence do not fit.
    """
    is_asynchronous = has_gpu if limits.async_scheduling is None else limits.async_scheduling
    least = state_slots_per_sequence(is_asynchronous=is_asynchronous)
    num_slots = min((least + 1) * limits.max_num_seqs, available // 2 // slot_bytes - 1)
    if num_slots < least:
        raise ModelLoadError(
            f"{limit}; recurrent state gets at most half of that, and its {least + 1} slots need "
            f"{(least + 1) * slot_bytes} bytes"
        )
    return num_slots


def state_bytes(num_slots: int, slot_bytes: int) -> int:
    """Return the size of slots for recurrent state, with the scratch slot, in bytes."""
    return (num_slots + 1) * slot_bytes


def choose_max_model_len(longest: int | None, asked: int | None) -> int:
    """Return the requested maximum length, or else the longest that the position encoding serves unchanged.

    Raises:
        ModelLoadError: it is longer than that, shorter than two tokens, or neither is known.
    """
    if asked is not None and longest is not None and asked > longest:
        raise ModelLoadError(f"max_model_len is {asked}; the model serves at most {longest} tokens")
    if asked is not None and asked < 2:
        raise ModelLoadError(f"max_model_len is {asked}; a sequence needs at least 2 tokens")
    chosen = asked if asked is not None else longest
    if chosen is None:
        raise ModelLoadError("the model's config names no max_position_embeddings; set max_model_len")
    return chosen
