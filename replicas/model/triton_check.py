"""Whether the kernels give on this device what plain torch gives: every kind of launch that a model will need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.model.attention import AttentionCall, AttentionContext, Scoring
from replicas.model.batch_inputs import BatchInputs, build_inputs
from replicas.model.gather_attention import GatherAttention
from replicas.model.kv_cache import KVCache
from replicas.model.probe import AttentionLayer
from replicas.model.scratch import scratch_item
from replicas.model.triton_attention import TritonBackend

# Chunks [start, end), each of another sequence: all that earlier passes computed, then a mixture of decodes and chunks.
_EARLIER = ((0, 3), (0, 299), (0, 37))
_PASSES = (_EARLIER, ((3, 4), (299, 300), (37, 75), (0, 20)), ((4, 5), (300, 301)), ((5, 6), (301, 330)))
_LONGEST = 330
# Of a token's output against plain torch's; what is wrong differs by about 1.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Of pretended devices: on one no keys are divided into parts, on the other all.
_FEW_PROCESSORS, _MANY_PROCESSORS = 0, 4096


@dataclass(frozen=True, slots=True)
class _Problem:
    layer: AttentionLayer
    block_size: int
    dtype: torch.dtype
    device: torch.device


def check_triton(
    layers: Iterable[AttentionLayer], block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with the kernels for `layers`, in words; None: nothing.

    Compiles all that serving needs. Layers that look the same are checked once.
    """
    for layer in dict.fromkeys(replace(layer, index=0) for layer in layers):
        problem = _Problem(layer, block_size, dtype, device)
        for num_processors in (_FEW_PROCESSORS, _MANY_PROCESSORS):
            # Whatever compiler, driver and device may raise: the other backend needs none of it.
            try:
                difference = _largest_difference(problem, num_processors)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            if not difference <= _TOLERANCES[dtype]:  # Also if it is no number.
                return f"{layer} in {dtype} differs from plain torch by {difference:.1e}, relative to each output"
    return None


@torch.inference_mode()
def _largest_difference(problem: _Problem, num_processors: int) -> float:
    """Over all tokens of all passes: the norm of the difference, divided by the norm of what plain torch gives."""
    backend = TritonBackend(num_processors)
    ours, reference = _new_cache(problem), _new_cache(problem)
    differences = []
    for inputs, call in _calls(problem):
        contexts: tuple[AttentionContext, ...] = (backend(ours, inputs), GatherAttention(reference, inputs))
        output, expected = (context.attend(call).float().flatten(1) for context in contexts)
        differences.append(((output - expected).norm(dim=1) / expected.norm(dim=1)).max())
    return float(torch.stack(differences).amax())


def _calls(problem: _Problem) -> Iterator[tuple[BatchInputs, AttentionCall]]:
    generator = torch.Generator().manual_seed(0)
    layer = problem.layer

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(problem.device, problem.dtype)

    sinks = draw(layer.num_query_heads) if layer.has_sinks else None
    for chunks in _PASSES:
        items = [_item(problem, index, start, end) for index, (start, end) in enumerate(chunks)]
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


def _item(problem: _Problem, index: int, start: int, end: int) -> ScheduledSequence:
    """A chunk of sequence `index`, whose blocks are of descending number."""
    item = scratch_item(start, end - start, problem.block_size)
    num_blocks = _num_blocks_each(problem)
    item.sequence.block_table = [num_blocks * (index + 1) - i for i in range(num_blocks)]
    return item


def _new_cache(problem: _Problem) -> KVCache:
    num_blocks = _num_blocks_each(problem) * max(len(chunks) for chunks in _PASSES)
    return KVCache([problem.layer], num_blocks, problem.block_size, problem.dtype, problem.device)


def _num_blocks_each(problem: _Problem) -> int:
    return -(-_LONGEST // problem.block_size)
