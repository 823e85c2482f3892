"""Attention by the tensors of a plan, in plain torch: what a captured step gets, on a processor."""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.model.attention.gather import attend_dense
from replicas.model.attention.interface import AttentionCall
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.plan import AttentionPlan, ChunkGroup
from testkit.model.paged_cases import attend_by_definition


class PlannedGather:
    """Attention by the tensors of a plan alone, over every slot that its tables name."""

    def __init__(self, cache: KVCache, slots: Tensor, plan: AttentionPlan) -> None:
        self._cache, self._slots, self._plan = cache, slots, plan

    def attend(self, call: AttentionCall) -> Tensor:
        layer = self._cache[call.layer]
        layer.write(self._slots, call.key, call.value)
        # Rows in no chunk are undefined.
        output = call.value.new_full((*call.query.shape[:2], call.value.shape[2]), torch.nan)
        if self._plan.decodes is not None and bool((self._plan.decodes.chunks[:, 2] > 0).any()):
            self._attend_decodes(call, self._plan.decodes, output)
        if self._plan.prefills is not None:
            self._attend_chunks(call, self._plan.prefills, output)
        return output

    def _attend_decodes(self, call: AttentionCall, group: ChunkGroup, output: Tensor) -> None:
        layer, chunks = self._cache[call.layer], group.chunks[group.chunks[:, 2] > 0]
        lengths = torch.where(chunks[:, 3] >= 0, chunks[:, 1] + 1, 0).clamp(min=1)[:, None]
        tables = group.tables[chunks[:, 3]].long()
        keys, values = layer.keys[tables].flatten(1, 2), layer.values[tables].flatten(1, 2)
        positions = torch.arange(keys.shape[1])
        visible = (positions < lengths) & (positions >= lengths - (call.window or keys.shape[1]))
        # Positions that a row does not see hold undefined numbers.
        keys, values = (part.masked_fill(~visible[:, :, None, None], 0.0).transpose(1, 2) for part in (keys, values))
        rows = chunks[:, 0].long()
        attended = attend_dense(call.query[rows][:, :, None], keys, values, visible[:, None, None], call.scoring)
        output[rows] = attended[:, :, 0]

    def _attend_chunks(self, call: AttentionCall, group: ChunkGroup, output: Tensor) -> None:
        layer = self._cache[call.layer]
        for row, start, num_tokens, table_row in group.chunks.tolist():
            rows, end = slice(row, row + num_tokens), start + num_tokens
            if num_tokens > 0 and table_row < 0:
                output[rows] = 0.0
            elif num_tokens > 0:
                blocks = group.tables[table_row, : -(-end // self._cache.block_size)].long()
                keys, values = (part[blocks].flatten(0, 1)[:end] for part in (layer.keys, layer.values))
                attended = attend_by_definition(call.query[rows], keys, values, call.scoring, call.window)
                output[rows] = attended.to(output.dtype)
