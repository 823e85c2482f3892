"""Batches over a paged cache, compared with attention by definition in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention.interface import AttentionBackend, AttentionCall, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.batch.inputs import build_inputs
from replicas.protocol import GenerateRequest, SamplingParams

Chunks = tuple[tuple[int, int], ...]

# Positions [start, end) of each chunk: decodes of very different length, whole prompts, later chunks, mixtures.
MIXTURES: dict[str, Chunks] = {
    "decodes": ((0, 1), (16, 17), (299, 300), (15, 16), (40, 41), (31, 32)),
    "prefills": ((0, 40), (0, 3), (13, 50), (100, 121)),
    "mixed": ((299, 300), (0, 2), (50, 51), (30, 75)),
}
_MAX_ROWS = 256
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attend_by_definition(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, window: int | None) -> Tensor:
    """Return causal attention of one sequence's last tokens, in float64.

    Shapes: `query` [n, H, D], `keys` [L, Hkv, D], `values` [L, Hkv, Dv].
    """
    num_tokens, num_heads, _ = query.shape
    length, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    positions = torch.arange(length, device=query.device)
    distance = positions[length - num_tokens :, None] - positions
    visible = (distance >= 0) & (distance < (window or length))
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + scoring.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, values.double())


def sequences(lengths: list[int], block_size: int, num_blocks: int) -> list[Sequence]:
    """Return sequences of known tokens that own blocks in random order."""
    free = list(range(1, num_blocks + 1))
    random.Random(0).shuffle(free)
    made = []
    for number, length in enumerate(lengths):
        request = GenerateRequest(f"request-{number}", (1,) * length, SamplingParams(max_tokens=1))
        sequence = Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=number)
        sequence.block_table = [free.pop() for _ in range(-(-length // block_size))]
        made.append(sequence)
    return made


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of chunks, each of another sequence, and the attention layer's shape."""

    chunks: Chunks = ()
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    scale: float = 0.3

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(0, *self.heads, *self.sizes, self.window, self.softcap, self.has_sinks)

    @property
    def num_blocks(self) -> int:
        return sum(-(-end // self.block_size) for _, end in self.chunks)

    def of(self, chunks: Chunks) -> Case:
        return replace(self, chunks=chunks)


# One case for each property that kernels treat differently, small enough for Triton's interpreter. It cannot multiply
# bfloat16.
KINDS = {
    "plain": Case(),
    "one-head-each": Case(heads=(3, 3)),
    "group-of-7": Case(heads=(14, 2)),
    "group-of-20": Case(heads=(20, 1)),
    "group-of-130": Case(heads=(130, 1)),
    "window": Case(window=24),
    "window-of-1": Case(window=1),
    "softcap": Case(softcap=5.0),
    "sinks": Case(has_sinks=True),
    "all": Case(window=40, softcap=5.0, has_sinks=True, heads=(6, 2)),
    "sizes-24-8": Case(sizes=(24, 8)),
    "sizes-80": Case(sizes=(80, 80), heads=(2, 1), scale=0.1),
    "blocks-of-4": Case(block_size=4),
    "blocks-of-5": Case(block_size=5, window=24),
    "blocks-of-64": Case(block_size=64),
    "float16": Case(dtype=torch.float16),
}


def largest_error(case: Case, attention: AttentionBackend, device: torch.device) -> float:
    """Return the largest error of an output number, divided by the expected value or by 1 if that is larger."""
    drawn = [_Drawn.of(case, end, seed, device) for seed, (_, end) in enumerate(case.chunks)]
    scoring = Scoring(case.scale, case.softcap, _draw(99, device, case.heads[0]) if case.has_sinks else None)
    cache = KVCache([case.layer], case.num_blocks, case.block_size, case.dtype, device)
    # Blocks may hold stale values of a former owner, even NaN. The output must not depend on them.
    cache[0].keys.fill_(torch.nan)
    cache[0].values.fill_(torch.nan)
    owners = sequences([end for _, end in case.chunks], case.block_size, case.num_blocks)
    for owner, numbers, (start, _) in zip(owners, drawn, case.chunks, strict=True):
        if start > 0:  # keys and values of earlier steps
            slots = build_inputs([ScheduledSequence(owner, 0, start)], case.block_size, device).slots
            cache[0].write(slots, numbers.keys[:start], numbers.values[:start])
    parts = [slice(start, end) for start, end in case.chunks]
    query = torch.cat([numbers.query[part] for numbers, part in zip(drawn, parts, strict=True)])
    call = AttentionCall(
        layer=0,
        # Heads before tokens in memory, as in many models.
        query=query.transpose(0, 1).contiguous().transpose(0, 1),
        key=torch.cat([numbers.keys[part] for numbers, part in zip(drawn, parts, strict=True)]),
        value=torch.cat([numbers.values[part] for numbers, part in zip(drawn, parts, strict=True)]),
        scoring=scoring,
        window=case.window,
        extras=frozenset(),
    )
    items = [
        ScheduledSequence(owner, start, end - start) for owner, (start, end) in zip(owners, case.chunks, strict=True)
    ]
    outputs = attention(cache, build_inputs(items, case.block_size, device)).attend(call)
    rows = outputs.split([item.num_tokens for item in items])
    errors = [_error(*each, scoring, case.window) for each in zip(rows, drawn, parts, strict=True)]
    return float(torch.stack(errors).amax())


@dataclass(frozen=True, slots=True)
class _Drawn:
    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, case: Case, length: int, seed: int, device: torch.device) -> _Drawn:
        (num_heads, num_kv_heads), (key_size, value_size) = case.heads, case.sizes
        shapes = ((num_heads, key_size), (num_kv_heads, key_size), (num_kv_heads, value_size))
        return cls(*(_draw(3 * seed + i, device, length, *shape).to(case.dtype) for i, shape in enumerate(shapes)))


def _draw(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _error(rows: Tensor, drawn: _Drawn, part: slice, scoring: Scoring, window: int | None) -> Tensor:
    """Return the largest error of a chunk, computed in pieces: the scores of a long chunk do not fit in memory."""
    errors = []
    for start in range(part.start, part.stop, _MAX_ROWS):
        end = min(start + _MAX_ROWS, part.stop)
        expected = attend_by_definition(drawn.query[start:end], drawn.keys[:end], drawn.values[:end], scoring, window)
        output = rows[start - part.start : end - part.start].double()
        errors.append(((output - expected).abs() / expected.abs().clamp(min=1.0)).amax())
    return torch.stack(errors).amax()  # amax keeps a NaN; `max` of floats would not
