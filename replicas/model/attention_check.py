"""Whether a way of computing attention gives what plain torch gives: every kind of call that a model will make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.model.attention import AttentionCall, AttentionContext, Scoring
from replicas.model.batch_inputs import BatchInputs, build_inputs
from replicas.model.gather_attention import GatherAttention
from replicas.model.kv_cache import KVCache
from replicas.model.probe import AttentionLayer
from replicas.model.runner import AttentionFactory
from replicas.model.scratch import scratch_item

Passes = tuple[tuple[tuple[int, int], ...], ...]
"""Of each pass the chunks [start, end), each of another sequence; what lies before, earlier passes have computed."""
_EARLIER = ((0, 3), (0, 299), (0, 37))
SHORT_PASSES: Passes = (_EARLIER, ((3, 4), (299, 300), (37, 75), (0, 20)), ((4, 5), (300, 301)), ((5, 6), (301, 330)))
LONG_PASSES: Passes = (*SHORT_PASSES, ((6, 7), (330, 1800)), ((7, 8), (1800, 1801)), ((8, 30), (1801, 1802)))
# Of a token's output against plain torch's; what is wrong differs by about 1.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """For what a way of computing attention is tried."""

    layers: Sequence[AttentionLayer]
    """Those that look the same are tried once."""
    block_size: int
    dtype: torch.dtype
    device: torch.device


def check_attention(
    problem: AttentionProblem, candidates: Sequence[AttentionFactory], passes: Passes = SHORT_PASSES
) -> str | None:
    """What is wrong with one of `candidates`, in words; None: nothing.

    Compiles all that serving needs. What is in the cache beside the keys and values of the sequences is no number, so
    that a candidate which reads it, if only to multiply it by zero, is found out.
    """
    for layer in dict.fromkeys(replace(layer, index=0) for layer in problem.layers):
        for candidate in candidates:
            # Whatever compiler, driver and device may raise: plain torch needs none of it.
            try:
                difference = _largest_difference(problem, layer, candidate, passes)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            if not difference <= _TOLERANCES[problem.dtype]:  # Also if it is no number.
                return (
                    f"{layer} in {problem.dtype} differs from plain torch by {difference:.1e}, relative to each output"
                )
    return None


@torch.inference_mode()
def _largest_difference(
    problem: AttentionProblem, layer: AttentionLayer, candidate: AttentionFactory, passes: Passes
) -> float:
    """Over all tokens of all passes: the norm of the difference, divided by the norm of what plain torch gives."""
    num_blocks = -(-max(end for chunks in passes for _, end in chunks) // problem.block_size)
    num_sequences = max(len(chunks) for chunks in passes)
    ours, reference = (_new_cache(problem, layer, num_sequences * num_blocks, fill) for fill in (torch.nan, 0.0))
    differences = []
    for inputs, call in _calls(problem, layer, passes, num_blocks):
        contexts: tuple[AttentionContext, ...] = (candidate(ours, inputs), GatherAttention(reference, inputs))
        output, expected = (context.attend(call).float().flatten(1) for context in contexts)
        differences.append(((output - expected).norm(dim=1) / expected.norm(dim=1)).max())
    return float(torch.stack(differences).amax())


def _calls(
    problem: AttentionProblem, layer: AttentionLayer, passes: Passes, num_blocks: int
) -> Iterator[tuple[BatchInputs, AttentionCall]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(problem.device, problem.dtype)

    sinks = draw(layer.num_query_heads) if layer.has_sinks else None
    for chunks in passes:
        items = [_item(problem, index, start, end, num_blocks) for index, (start, end) in enumerate(chunks)]
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
        yield build_inputs(items, problem.block_size, problem.device), call


def _item(problem: AttentionProblem, index: int, start: int, end: int, num_blocks: int) -> ScheduledSequence:
    """A chunk of sequence `index`, whose blocks are of descending number."""
    item = scratch_item(start, end - start, problem.block_size)
    item.sequence.block_table = [num_blocks * (index + 1) - i for i in range(num_blocks)]
    return item


def _new_cache(problem: AttentionProblem, layer: AttentionLayer, num_blocks: int, fill: float) -> KVCache:
    cache = KVCache([layer], num_blocks, problem.block_size, problem.dtype, problem.device)
    for part in (cache[0].keys, cache[0].values):
        part.fill_(fill)
    return cache
