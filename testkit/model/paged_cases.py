"""Batches over a paged cache, compared with attention by definition in float64.

`flash_attn_with_kvcache` is a stand-in for the package of that function.
"""

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
    """Batch of chunks, each of another sequence, and the attention layer's shape."""

    chunks: Chunks = ()
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    scale: float = 0.3
    cache_dtype: torch.dtype | None = None
    """int8 or float8_e4m3fn; None: `dtype`."""
    has_values_in_keys: bool = False

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(
            0,
            *self.heads,
            *self.sizes,
            self.window,
            self.softcap,
            self.has_sinks,
            has_values_in_keys=self.has_values_in_keys,
        )

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
    "latent": Case(heads=(20, 1), sizes=(48, 32), has_values_in_keys=True),
}


def largest_error(
    case: Case, attention: AttentionBackend, device: torch.device, computes_earlier: bool = False
) -> float:
    """Return the largest error of an output number, divided by the expected value or by 1 if that is larger.

    Keys and values in 8 bits are expected as they come back from the cache.
    """
    rows = attention_outputs(case, attention, device, computes_earlier)
    drawn, scoring = _draw_case(case, device)
    drawn = [numbers.as_cached(case) for numbers in drawn]
    parts = [slice(start, end) for start, end in case.chunks]
    errors = [_error(*each, scoring, case.window) for each in zip(rows, drawn, parts, strict=True)]
    return float(torch.stack(errors).amax())


def attention_outputs(
    case: Case, attention: AttentionBackend, device: torch.device, computes_earlier: bool = False
) -> tuple[Tensor, ...]:
    """Return the output of each chunk.

    If `computes_earlier`, `attention` also computes the positions before the chunks. Otherwise plain torch stores
    their keys and values.
    """
    drawn, scoring = _draw_case(case, device)
    cache = KVCache([case.layer], case.num_blocks, case.block_size, case.cache_dtype or case.dtype, device)
    # Blocks may hold stale values of a former owner, even NaN. The output must not depend on them.
    for part, scales in cache[0].parts:
        (part if scales is None else scales).fill_(torch.nan)
    owners = sequences([end for _, end in case.chunks], case.block_size, case.num_blocks)
    earlier = [ScheduledSequence.of(owner, 0, start) for owner, (start, _) in zip(owners, case.chunks, strict=True)]
    known = [each for each in zip(earlier, drawn, strict=True) if each[0].num_tokens > 0]
    if known and computes_earlier:
        _attend(case, attention, cache, known, scoring)
    else:
        for item, numbers in known:
            slots = build_inputs([item], case.block_size, device).slots
            cache[0].write(slots, numbers.keys[: item.end], numbers.values[: item.end])
    for owner, (start, _) in zip(owners, case.chunks, strict=True):
        # Blocks behind the window were given back. Block 0 in their places holds NaN.
        num_unseen = 0 if case.window is None else max(0, start + 1 - case.window) // case.block_size
        owner.block_table[:num_unseen] = [0] * num_unseen
    items = [
        ScheduledSequence.of(owner, start, end - start) for owner, (start, end) in zip(owners, case.chunks, strict=True)
    ]
    output = _attend(case, attention, cache, list(zip(items, drawn, strict=True)), scoring)
    return torch.split(output, [item.num_tokens for item in items])


def _attend(
    case: Case,
    attention: AttentionBackend,
    cache: KVCache,
    items: list[tuple[ScheduledSequence, _Drawn]],
    scoring: Scoring,
) -> Tensor:
    query, key, value = (
        torch.cat([getattr(numbers, name)[item.start : item.end] for item, numbers in items])
        for name in ("query", "keys", "values")
    )
    # Heads before tokens in memory, as in many models.
    query = query.transpose(0, 1).contiguous().transpose(0, 1)
    inputs = build_inputs([item for item, _ in items], case.block_size, query.device)
    return attention(cache, inputs).attend(AttentionCall(0, query, key, value, scoring, case.window, frozenset()))


def _draw_case(case: Case, device: torch.device) -> tuple[list[_Drawn], Scoring]:
    drawn = [_Drawn.of(case, end, seed, device) for seed, (_, end) in enumerate(case.chunks)]
    return drawn, Scoring(case.scale, case.softcap, _draw(99, device, case.heads[0]) if case.has_sinks else None)


@dataclass(frozen=True, slots=True)
class _Drawn:
    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, case: Case, length: int, seed: int, device: torch.device) -> _Drawn:
        (num_heads, num_kv_heads), (key_size, value_size) = case.heads, case.sizes
        shapes = ((num_heads, key_size), (num_kv_heads, key_size), (num_kv_heads, value_size))
        drawn = cls(*(_draw(3 * seed + i, device, length, *shape).to(case.dtype) for i, shape in enumerate(shapes)))
        return replace(drawn, values=drawn.keys[..., :value_size]) if case.has_values_in_keys else drawn

    def as_cached(self, case: Case) -> _Drawn:
        """Return keys and values after a way through the case's cache; in 8 bits they are float32."""
        if case.cache_dtype is None:
            return self
        cache = KVCache([case.layer], 1, len(self.keys), case.cache_dtype, self.keys.device)
        cache[0].write(torch.arange(len(self.keys), device=self.keys.device), self.keys, self.values)
        block = torch.zeros(1, dtype=torch.int64, device=self.keys.device)
        keys, values = (part[0] for part in cache[0].read(block, torch.float32))
        return _Drawn(self.query, keys, values)


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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Compute what the function of this name in `flash_attn_interface` documents; the package needs a GPU.

    Shapes: `q` [total_q, heads, size], caches [num_pages, page_size, kv_heads, size]. Returns attention [total_q,
    heads, value_size]; the last queries of a sequence see all its keys. Whole tiles of 128 keys are read.
    """
    for numbers in (cache_seqlens, page_table, cu_seqlens_q):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    assert q.stride(-1) == 1 and causal and window_size[1] in (-1, 0)
    num_sequences = len(cache_seqlens)
    assert page_table.shape[0] == num_sequences == len(cu_seqlens_q) - 1
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    output = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    for index in range(num_sequences):
        start, end, length = int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]), int(cache_seqlens[index])
        assert end - start <= max_seqlen_q
        keys, values = (part[page_table[index].long()].flatten(0, 1)[:length] for part in (k_cache, v_cache))
        window = None if window_size[0] < 0 else window_size[0] + 1
        scoring = Scoring(softmax_scale, softcap or None)
        first = 0 if window is None else max(0, length - (end - start) + 1 - window) // 128 * 128
        hidden = 0.0 * values[first:].double().sum()
        attended = attend_by_definition(q[start:end], keys[first:], values[first:], scoring, window)
        output[start:end] = (attended + hidden).to(q.dtype)
    return output
