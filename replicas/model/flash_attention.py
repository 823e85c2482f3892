"""Attention over the paged cache in FlashAttention 3, where it is installed: one call for any mixture of chunks.

Shah et al., FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision, 2024. It is written for
devices of compute capability 9 and numbers of 16 bits, and ends the process where it finds another device; those, and
layers with sinks, are served by other backends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.attention import AttentionCall
from replicas.model.batch_inputs import BatchInputs, Chunk
from replicas.model.kv_cache import KVCache
from replicas.model.triton_tiles import padded_tables, place

_MODULE = "flash_attn_interface"

Attend = Callable[..., Tensor]
"""`flash_attn_with_kvcache` of the package."""


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Chunks of sequences laid end to end in a flat batch."""

    tables: Tensor
    """[num_chunks, num_blocks] int32: each sequence's blocks; past its own anything that is a block."""
    num_keys: Tensor
    """[num_chunks] int32: keys that the last token of each chunk sees."""
    first_rows: Tensor
    """[num_chunks + 1] int32: where each chunk begins in the flat batch, and its end."""
    longest_chunk: int


class FlashAttention:
    """Attention of one forward pass."""

    def __init__(self, cache: KVCache, slots: Tensor, plan: VarlenPlan, attend: Attend) -> None:
        self._cache = cache
        self._slots = slots
        self._plan = plan
        self._attend = attend

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's keys and values, then attend; [num_tokens, num_query_heads, value_size]."""
        if call.scoring.sinks is not None:
            raise NotImplementedError("FlashAttention 3 has no attention sinks")
        layer = self._cache[call.layer]
        layer.write(self._slots, call.key, call.value)
        return self._attend(
            call.query,
            layer.keys,
            layer.values,
            cache_seqlens=self._plan.num_keys,
            page_table=self._plan.tables,
            cu_seqlens_q=self._plan.first_rows,
            max_seqlen_q=self._plan.longest_chunk,
            softmax_scale=call.scoring.scale,
            causal=True,
            window_size=(-1, -1) if call.window is None else (call.window - 1, 0),
            softcap=call.scoring.softcap or 0.0,
        )


class FlashBackend:
    """Makes the attention of each forward pass."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelLoadError where the package is not installed, or not made for the device and `dtype`."""
        try:
            self._attend: Attend = importlib.import_module(_MODULE).flash_attn_with_kvcache
        except (ImportError, AttributeError) as error:
            raise ModelLoadError(f"the package {_MODULE} cannot be used: {error}") from error
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability[0] != 9 or dtype.itemsize != 2:
                raise ModelLoadError(f"it is not made for {dtype} and compute capability {capability}")

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> FlashAttention:
        """Attention of the chunks of `inputs`."""
        return FlashAttention(cache, inputs.slots, _plan(inputs.chunks, inputs.slots.device), self._attend)


def _plan(chunks: Sequence[Chunk], device: torch.device) -> VarlenPlan:
    """The plan of a flat batch. Copies to the device are not waited for."""
    last = chunks[-1]
    return VarlenPlan(
        tables=place(padded_tables(chunks), len(chunks), device),
        num_keys=place([chunk.end for chunk in chunks], len(chunks), device).flatten(),
        first_rows=place(
            [*(chunk.row for chunk in chunks), last.row + last.num_tokens], len(chunks) + 1, device
        ).flatten(),
        longest_chunk=max(chunk.num_tokens for chunk in chunks),
    )
