"""Attention backend over the compiled C++ kernel, on CPU."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from replicas.model.attention.interface import AttentionCall, with_dense_heads
from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.batch.inputs import BatchInputs

# Numbers per vector: the kernel reads keys and values in such pieces.
_HEAD_SIZE_UNIT = 16


def can_attend(layers: Sequence[AttentionLayer]) -> bool:
    """Return True if `CppAttention` supports `layers`."""
    return all(size % _HEAD_SIZE_UNIT == 0 for layer in layers for size in (layer.key_size, layer.value_size))


class CppAttention:
    """Attention of one forward pass in the compiled kernel. It needs the kernels, and `can_attend` must be True.

    The kernel reads only slots that a token sees, so blocks need not be cleared.
    """

    kernels = "C++ kernels"

    def __init__(self, cache: KVCache, inputs: BatchInputs) -> None:
        self.cache = cache
        self.slots = inputs.slots  # [num_tokens] int64
        chunks: list[tuple[int, int, int, int]] = []
        tables = array("i")
        for chunk in inputs.chunks:
            chunks.append((chunk.row, chunk.start, chunk.end, len(tables)))
            tables.extend(chunk.block_table)
        self.chunks = torch.tensor(chunks, dtype=torch.int64)
        """[num_chunks, 4]: first row, first position, end position, start in `tables`"""
        self.tables = torch.frombuffer(tables, dtype=torch.int32).long()
        """[num_blocks of all chunks]: the block tables of all chunks, concatenated."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's keys and values, and return its output [num_tokens, num_query_heads, value_size]."""
        layer, scoring = self.cache[call.layer], call.scoring
        output: Tensor = torch.ops.headway.attend_paged.default(
            *map(with_dense_heads, (call.query, call.key, call.value)),
            layer.keys,
            layer.values,
            layer.key_scales,
            layer.value_scales,
            self.slots,
            self.chunks,
            self.tables,
            scoring.scale,
            call.window or 0,
            scoring.softcap or 0.0,
            None if scoring.sinks is None else scoring.sinks.float(),
        )
        return output


class CppTwoSidedAttention:
    """Attention of one forward pass over whole texts, in the compiled kernel. It needs the kernels."""

    kernels = "C++ kernels, two-sided"

    def __init__(self, cache: KVCache, inputs: BatchInputs) -> None:
        """`cache` has no layers."""
        self._texts = torch.tensor([(chunk.row, chunk.num_tokens) for chunk in inputs.chunks], dtype=torch.int64)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the call's output [num_tokens, num_query_heads, value_size]."""
        output: Tensor = torch.ops.headway.attend_texts.default(
            *map(with_dense_heads, (call.query, call.key, call.value)),
            self._texts,
            call.scoring.scale,
            call.window or 0,
        )
        return output
