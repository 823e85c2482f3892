"""Gathered attention over the paged cache against attention by definition, over every mixture of chunks."""

from __future__ import annotations

import itertools

import pytest
import torch

from replicas.engine.batch import ScheduledSequence
from replicas.model.attention import dense, gather
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionCall, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.batch.inputs import build_inputs
from testkit.model.paged_cases import MIXTURES, attend_by_definition, sequences

CPU = torch.device("cpu")

KINDS = list(itertools.product([None, 1, 24, 40], [None, 5.0], [False, True]))


@pytest.mark.parametrize("chunks", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("heads", "sizes"), [((4, 4), (16, 16)), ((6, 2), (16, 16)), ((4, 2), (24, 8))])
def test_equals_attention_by_definition(
    chunks: list[tuple[int, int]], heads: tuple[int, int], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_MAX_GATHERED_SLOTS", 256)
    monkeypatch.setattr(gather, "_SHORT_BLOCKS", 2)
    monkeypatch.setattr(dense, "_MAX_SCORES", 2000)
    generator = torch.Generator().manual_seed(0)
    (num_heads, num_kv_heads), (key_size, value_size) = heads, sizes
    layer = AttentionLayer(0, num_heads, num_kv_heads, key_size, value_size, None, None, False)
    owners = sequences([end for _, end in chunks], block_size=16, num_blocks=64)
    keys = [torch.randn(end, num_kv_heads, key_size, generator=generator) for _, end in chunks]
    values = [torch.randn(end, num_kv_heads, value_size, generator=generator) for _, end in chunks]
    query = torch.randn(sum(end - start for start, end in chunks), num_heads, key_size, generator=generator)
    for window, softcap, has_sinks in KINDS:
        cache = KVCache([layer], 64, 16, torch.float32, CPU)
        # What a former owner left must not show, not even a NaN.
        cache[0].keys.fill_(torch.nan)
        cache[0].values.fill_(torch.nan)
        scoring = Scoring(0.3, softcap, torch.randn(num_heads, generator=generator) if has_sinks else None)
        outputs = {}
        for is_now in (False, True):  # First what is already in the cache, then the chunks themselves.
            items, parts = [], []
            for index, (start, end) in enumerate(chunks):
                first, last = (start, end) if is_now else (0, start)
                if last > first:
                    items.append(ScheduledSequence(owners[index], first, last - first))
                    parts.append((index, slice(first, last)))
            if not items:
                continue
            context = GatherAttention(cache, build_inputs(items, 16, CPU))
            call = AttentionCall(
                layer=0,
                query=query if is_now else query.new_zeros(sum(i.num_tokens for i in items), num_heads, key_size),
                key=torch.cat([keys[index][part] for index, part in parts]),
                value=torch.cat([values[index][part] for index, part in parts]),
                scoring=scoring,
                window=window,
                extras=frozenset(),
            )
            outputs[is_now] = context.attend(call)
        row = 0
        for index, (start, end) in enumerate(chunks):
            rows = slice(row, row + end - start)
            expected = attend_by_definition(query[rows], keys[index], values[index], scoring, window)
            torch.testing.assert_close(outputs[True][rows].double(), expected, atol=2e-5, rtol=1e-4)
            row = rows.stop


def test_only_blocks_inside_the_window_are_read() -> None:
    layer = AttentionLayer(0, 1, 1, 8, 8, 24, None, False)
    cache = KVCache([layer], 64, 16, torch.float32, CPU)
    (owner,) = sequences([400], block_size=16, num_blocks=64)
    ones = torch.ones(400, 1, 8)
    for start, num_tokens in ((0, 395), (395, 4), (399, 1)):
        inputs = build_inputs([ScheduledSequence(owner, start, num_tokens)], 16, CPU)
        rows = ones[:num_tokens]
        call = AttentionCall(0, rows, rows, rows, Scoring(1.0), 24, frozenset())
        torch.testing.assert_close(GatherAttention(cache, inputs).attend(call), rows)
        # The blocks of positions 0..367, which no later token sees.
        cache[0].keys[owner.block_table[:23]] = torch.nan
