"""Facts about a model that the check by transformers finds out, and what follows from them. The module needs no torch.

`check_model` writes the facts; a start compares the settings with them before a replica loads anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.hardware.processor import value_bytes_on_cpu
from replicas.model.loading.options import ModelOptions, RunnerOptions

_SCALE_BYTES = 4


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

    def write(self) -> str:
        """Return the facts in one line, for `read`."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the facts that `write` has written."""
        return cls(**json.loads(line))

    def kv_token_bytes(self, model: ModelOptions, runner: RunnerOptions) -> int | None:
        """Return the size of one token in a KV cache on CPU, bytes."""
        if self.kv_numbers is None or self.kv_scales is None:
            return None
        if runner.kv_cache_dtype == "auto":
            return self.kv_numbers * value_bytes_on_cpu(model.dtype)
        return self.kv_numbers + self.kv_scales * _SCALE_BYTES

    def check_cache(self, model: ModelOptions, runner: RunnerOptions, limits: EngineLimits) -> None:
        """Check that the KV cache of a replica on CPU holds one sequence of `max_model_len` tokens, or else one block.

        Raises:
            ModelLoadError: it does not; the message has the least `kv_cache_bytes`.
        """
        token_bytes = self.kv_token_bytes(model, runner)
        num_tokens = model.max_model_len or 1
        num_blocks = -(-num_tokens // limits.block_size) + 1  # One block is the scratch block.
        if token_bytes is not None and runner.kv_cache_bytes < num_blocks * limits.block_size * token_bytes:
            of_tokens = "one block" if model.max_model_len is None else f"max_model_len ({num_tokens} tokens)"
            raise ModelLoadError(
                f"kv_cache_bytes is {runner.kv_cache_bytes}; a cache for {of_tokens} needs "
                f"{num_blocks * limits.block_size * token_bytes} bytes"
            )


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
