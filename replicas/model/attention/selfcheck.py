"""Checks of an attention backend against plain torch, over every kind of call that a model makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionCall, AttentionContext, AttentionSpec, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.batch.dummy import dummy_item
from replicas.model.batch.inputs import BatchInputs, build_inputs
from replicas.model.hardware.selfcheck import find_fault, relative_error

ChunkSchedule = tuple[tuple[tuple[int, int], ...], ...]
"""Chunks [start, end) of each pass, one per sequence; earlier passes have computed the positions before them."""
_EARLIER = ((0, 3), (0, 299), (0, 37))
SHORT_SCHEDULE: ChunkSchedule = (
    _EARLIER,
    ((3, 4), (299, 300), (37, 75), (0, 20)),
    ((4, 5), (300, 301)),
    ((5, 6), (301, 330)),
)
LONG_SCHEDULE: ChunkSchedule = (*SHORT_SCHEDULE, ((6, 7), (330, 1800)), ((7, 8), (1800, 1801)), ((8, 30), (1801, 1802)))


def check_attention(
    spec: AttentionSpec, candidates: Sequence[AttentionBackend], schedule: ChunkSchedule = SHORT_SCHEDULE
) -> str | None:
    """Return a description of the first fault of one of `candidates`; None if there is none.

    The check compiles all kernels that serving needs. Unused cache slots hold NaN, so a candidate that reads them
    fails, even if it multiplies them by zero. Layers of the same shape are checked once.
    """
    return find_fault(_errors(spec, candidates, schedule), spec.dtype)


@torch.inference_mode()
def _errors(
    spec: AttentionSpec, candidates: Sequence[AttentionBackend], schedule: ChunkSchedule
) -> Iterator[tuple[str, float]]:
    """Yield the relative error of each layer, candidate and pass, the largest over all tokens."""
    num_blocks = -(-max(end for chunks in schedule for _, end in chunks) // spec.block_size)
    num_sequences = max(len(chunks) for chunks in schedule)
    for layer in dict.fromkeys(replace(layer, index=0) for layer in spec.layers):
        for candidate in candidates:
            ours, reference = (_new_cache(spec, layer, num_sequences * num_blocks, fill) for fill in (torch.nan, 0.0))
            for inputs, call in _calls(spec, layer, schedule, num_blocks):
                contexts: tuple[AttentionContext, ...] = (candidate(ours, inputs), GatherAttention(reference, inputs))
                output, expected = (context.attend(call).flatten(1) for context in contexts)
                yield str(layer), relative_error(output, expected)


def _calls(
    spec: AttentionSpec, layer: AttentionLayer, schedule: ChunkSchedule, num_blocks: int
) -> Iterator[tuple[BatchInputs, AttentionCall]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(spec.device, spec.dtype)

    sinks = draw(layer.num_query_heads) if layer.has_sinks else None
    for chunks in schedule:
        items = [_item(spec, index, start, end, num_blocks) for index, (start, end) in enumerate(chunks)]
        num_tokens = sum(item.num_tokens for item in items)
        call = AttentionCall(
            layer=0,
            query=draw(num_tokens, layer.num_query_heads, layer.key_size),
            key=draw(num_tokens, layer.num_kv_heads, layer.key_size),
            value=draw(num_tokens, layer.num_kv_heads, layer.value_size),
            scoring=Scoring(layer.key_size**-0.5, layer.softcap, sinks),
            window=layer.window,
            extras=frozenset(),
        )
        yield build_inputs(items, spec.block_size, spec.device), call


def _item(spec: AttentionSpec, index: int, start: int, end: int, num_blocks: int) -> ScheduledSequence:
    """Return a chunk of sequence `index`. The sequence's block ids descend."""
    item = dummy_item(start, end - start, spec.block_size)
    item.sequence.block_table = [num_blocks * (index + 1) - i for i in range(num_blocks)]
    return item


def _new_cache(spec: AttentionSpec, layer: AttentionLayer, num_blocks: int, fill: float) -> KVCache:
    cache = KVCache([layer], num_blocks, spec.block_size, spec.dtype, spec.device)
    for part in (cache[0].keys, cache[0].values):
        part.fill_(fill)
    return cache
