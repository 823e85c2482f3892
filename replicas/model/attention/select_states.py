"""Selection of the backend of recurrent state, after a check against plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence, StateMove
from replicas.model.attention.recurrent import ConvCall, RuleCall, StateContext
from replicas.model.attention.select import ChunkSchedule
from replicas.model.attention.state_cache import StateCache, StateLayer
from replicas.model.attention.state_cpp import CppStates, can_advance
from replicas.model.attention.state_torch import TorchStates
from replicas.model.batch.inputs import BatchInputs, build_inputs, dummy_item
from replicas.model.hardware.selfcheck import find_fault, relative_error

StateBackend = Callable[[StateCache, BatchInputs], StateContext]
"""Factory of the recurrent state of one forward pass."""

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_SCHEDULE: ChunkSchedule = (((0, 3), (0, 50)), ((3, 4), (50, 51), (0, 33)), ((4, 16), (51, 70)), ((16, 17), (70, 71)))
NUM_CHECK_SLOTS = 6
"""State slots that the steps of a check use."""


def choose_states(layers: Sequence[StateLayer], dtype: torch.dtype, *, has_kernels: bool) -> StateBackend:
    """Return the fastest backend that works for `layers`. `has_kernels` is True if the compiled kernels are loaded."""
    if not has_kernels or not can_advance(layers):
        return TorchStates
    fault = find_fault(_errors(layers, dtype), dtype)
    if fault is None:
        return CppStates
    _log.warning("recurrent layers use plain torch and are slow: the compiled kernels do not work here: %s", fault)
    return TorchStates


def check_steps(hidden_size: int, dtype: torch.dtype) -> Iterator[tuple[BatchInputs, Tensor]]:
    """Yield steps of some sequences: their inputs, and hidden states [num_tokens, hidden_size]."""
    generator = torch.Generator().manual_seed(0)
    for chunks in _SCHEDULE:
        items = [_item(index, start, end) for index, (start, end) in enumerate(chunks)]
        num_tokens = sum(item.num_tokens for item in items)
        yield (
            build_inputs(items, _BLOCK_SIZE, _CPU),
            torch.randn(num_tokens, hidden_size, generator=generator).to(dtype),
        )


def check_cache(layer: StateLayer, dtype: torch.dtype) -> StateCache:
    """Return a cache for the steps of `check_steps`."""
    return StateCache([layer], NUM_CHECK_SLOTS, _BLOCK_SIZE, dtype, _CPU)


def _item(index: int, start: int, end: int) -> ScheduledSequence:
    """Return a chunk of sequence `index`. Its slot at a position follows from the block's number, even or odd."""
    source, target = (2 * index + 1 + position // _BLOCK_SIZE % 2 for position in (start, end))
    return replace(dummy_item(start, end - start, _BLOCK_SIZE), state=StateMove(source, target))


@torch.inference_mode()
def _errors(layers: Sequence[StateLayer], dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield the relative errors of the convolutions and rules. Layers of the same shape are checked once."""
    for layer in dict.fromkeys(replace(layer, index=0) for layer in layers):
        tested, reference = check_cache(layer, dtype), check_cache(layer, dtype)
        weight = torch.randn(layer.num_channels, layer.conv_width, generator=torch.Generator().manual_seed(1)).to(dtype)
        for inputs, channels in check_steps(layer.num_channels, dtype):
            contexts: tuple[StateContext, ...] = (CppStates(tested, inputs), TorchStates(reference, inputs))
            conv = ConvCall(0, channels, weight, None)
            yield "a convolution", relative_error(*(context.convolve(conv) for context in contexts))
            for rule in _rule_calls(layer, len(channels)):
                yield "a recurrent rule", relative_error(*(context.advance(rule) for context in contexts))


def _rule_calls(layer: StateLayer, num_tokens: int) -> Iterator[RuleCall]:
    """Yield calls of both rules for the same states; none for a layer without heads."""
    if not layer.num_heads:
        return
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    query, key = (draw(layer.num_key_heads, layer.key_size) / layer.key_size**0.5 for _ in range(2))
    value, decay = draw(layer.num_heads, layer.value_size), -draw(layer.num_heads).abs()
    for beta in (draw(layer.num_heads).sigmoid(), None):
        yield RuleCall(0, query, key, value, decay, beta)
