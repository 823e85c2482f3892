"""Attention backend over FlashAttention 3, where that package is installed: one call for any mixture of chunks.

Shah et al., FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision, 2024. The package
supports compute capability 9 and 16-bit numbers, and ends the process on any other device. Other backends serve other
devices and layers with sinks.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionCall
from replicas.model.attention.kv_cache import KVCache, LayerCache
from replicas.model.attention.plan import padded_tables, place
from replicas.model.batch.inputs import BatchInputs, Chunk

_MODULE = "flash_attn_interface"

Attend = Callable[..., Tensor]
"""Type of the package's `flash_attn_with_kvcache`."""
Write = Callable[[LayerCache, Tensor, AttentionCall], None]
"""Storage of a call's keys and values in the slots [num_tokens] int64 of a layer."""


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Plan of a flat batch of chunks, as FlashAttention's call with variable lengths takes it."""

    tables: Tensor
    """[num_chunks, num_blocks] int32: each sequence's blocks, padded with any valid block. In the places of blocks
    behind a window is the sequence's first block, since the package reads whole tiles of keys."""
    num_keys: Tensor  # [num_chunks] int32: number of keys that the last token of each chunk sees
    first_rows: Tensor  # [num_chunks + 1] int32: first row of each chunk in the flat batch, then the number of rows
    longest_chunk: int


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Attention of one forward pass."""

    cache: KVCache
    slots: Tensor
    plan: VarlenPlan
    kernel: Attend
    write: Write

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's keys and values, and return its output [num_tokens, num_query_heads, value_size]."""
        if call.scoring.sinks is not None:
            raise NotImplementedError("FlashAttention 3 has no attention sinks")
        layer = self.cache[call.layer]
        self.write(layer, self.slots, call)
        return self.kernel(
            call.query,
            layer.keys,
            layer.values,
            cache_seqlens=self.plan.num_keys,
            page_table=self.plan.tables,
            cu_seqlens_q=self.plan.first_rows,
            max_seqlen_q=self.plan.longest_chunk,
            softmax_scale=call.scoring.scale,
            causal=True,
            window_size=(-1, -1) if call.window is None else (call.window - 1, 0),
            softcap=call.scoring.softcap or 0.0,
        )


class FlashBackend:
    """`AttentionBackend` over FlashAttention 3."""

    kernels = "FlashAttention 3"

    def __init__(self, dtype: torch.dtype, device: torch.device, write: Write | None = None) -> None:
        """Import the package. `write` stores keys and values; None: plain torch does, which is slower.

        Raises:
            ModelLoadError: the package is not installed, or does not support the device or `dtype`.
        """
        try:
            self._attend: Attend = importlib.import_module(_MODULE).flash_attn_with_kvcache
        except (ImportError, AttributeError) as error:
            raise ModelLoadError(f"the package {_MODULE} cannot be used: {error}") from error
        self._write = write or _write_plainly
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability[0] != 9 or dtype.itemsize != 2:
                raise ModelLoadError(f"it is not made for {dtype} and compute capability {capability}")

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> FlashAttention:
        """Return the attention of the chunks of `inputs`."""
        return FlashAttention(cache, inputs.slots, _plan(inputs.chunks, inputs.slots.device), self._attend, self._write)


def _write_plainly(layer: LayerCache, slots: Tensor, call: AttentionCall) -> None:
    layer.write(slots, call.key, call.value)


def _own(table: array[int]) -> array[int]:
    """Return the table with its first block also in the places of those that were given back."""
    num_missing = next((index for index, block in enumerate(table) if block), 0)
    return array("i", [table[num_missing]]) * num_missing + table[num_missing:]


def _plan(chunks: Sequence[Chunk], device: torch.device) -> VarlenPlan:
    """Return the plan of a flat batch. The copies to the device are asynchronous."""
    last, owning = chunks[-1], [replace(chunk, block_table=_own(chunk.block_table)) for chunk in chunks]
    return VarlenPlan(
        tables=place(padded_tables(owning), len(chunks), device),
        num_keys=place([chunk.end for chunk in chunks], len(chunks), device).flatten(),
        first_rows=place(
            [*(chunk.row for chunk in chunks), last.row + last.num_tokens], len(chunks) + 1, device
        ).flatten(),
        longest_chunk=max(chunk.num_tokens for chunk in chunks),
    )
