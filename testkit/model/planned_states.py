"""Recurrent state by the tensors of a plan, in plain torch: what a captured step gets, on a processor."""

from __future__ import annotations

from array import array

import torch

from replicas.engine.batch import StateMove
from replicas.model.attention.plan import StatePlan
from replicas.model.attention.state_cache import StateCache
from replicas.model.attention.state_torch import TorchStates
from replicas.model.batch.inputs import BatchInputs, Chunk


class PlannedTorchStates:
    """`StateBackend` in plain torch that also takes plans."""

    def __call__(self, cache: StateCache, inputs: BatchInputs) -> TorchStates:
        return TorchStates(cache, inputs)

    def planned(self, cache: StateCache, plan: StatePlan) -> TorchStates:
        chunks = [_chunk(fields) for fields in plan.chunks.tolist() if fields[2] > 0]
        nothing = torch.zeros(1, plan.num_tokens, dtype=torch.int64)
        # Before a graph's first step all rows are in no chunk.
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.row)) or (Chunk(0, 0, plan.num_tokens, array("i")),)
        return TorchStates(cache, BatchInputs(nothing, nothing, nothing[0], None, nothing[0], ordered))


def _chunk(fields: list[int]) -> Chunk:
    row, start, num_tokens, source, target, *others = fields
    snapshots = tuple((end, slot) for end, slot in zip(others[:-1:2], others[1::2], strict=True) if slot)
    return Chunk(row, start, start + num_tokens, array("i"), StateMove(source, target, snapshots))
