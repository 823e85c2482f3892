"""Selection of the backend of recurrent state, after checks against plain torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence, StateMove
from replicas.errors import ModelLoadError
from replicas.model.attention.recurrent import ConvCall, DeltaGates, RuleCall, StateBackend, StateContext
from replicas.model.attention.state_cache import StateCache, StateLayer
from replicas.model.attention.state_cpp import CppStates, can_advance
from replicas.model.attention.state_torch import TorchStates
from replicas.model.batch.inputs import BatchInputs, build_inputs, dummy_item
from replicas.model.hardware.selfcheck import Agree, agreed_fault, alone, find_fault, relative_error

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Requirements of a model on the backend of its recurrent state."""

    layers: Sequence[StateLayer]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    is_batch_invariant: bool = False
    has_kernels: bool = False
    """True if the compiled kernels for a CPU are loaded."""


def choose_states(spec: StateSpec, agree: Agree = alone) -> StateBackend | None:
    """Return the kernels for the device, if they work for `spec`, on all ranks that `agree`; None: plain torch.

    Raises:
        ModelLoadError: on a GPU the states must not depend on the batch, and Triton's kernels do not work.
    """
    if not spec.layers:
        return None
    if spec.device.type == "cuda":
        return _choose_on_gpu(spec, agree)
    if not spec.has_kernels or not can_advance(spec.layers):
        return None
    fault = check_states(spec, CppStates)
    if fault is None:
        return CppStates
    _log.warning("recurrent layers use plain torch and are slow: the compiled kernels do not work here: %s", fault)
    return None


def _choose_on_gpu(spec: StateSpec, agree: Agree) -> StateBackend | None:
    backend: StateBackend | None = None
    try:
        from replicas.model.attention.state_triton import TritonStateBackend  # Only torch for CUDA installs Triton.
    except ImportError as error:
        fault: str | None = str(error)
    else:
        backend = TritonStateBackend(is_batch_invariant=spec.is_batch_invariant)
        fault = check_states(spec, backend)
    fault = agreed_fault(fault, agree)
    if fault is None:
        return backend
    if spec.is_batch_invariant:
        raise ModelLoadError(f"batch_invariant is true, and the kernels of recurrent layers do not work here: {fault}")
    _log.warning("recurrent layers use plain torch and are slow: Triton's kernels do not work here: %s", fault)
    return None


def check_states(spec: StateSpec, backend: StateBackend) -> str | None:
    """Return a description of the first fault of `backend`; None if there is none.

    The check covers first tokens, decodes and chunks that end within a block, at its end and behind it, and slots that
    several sequences read. Layers of the same shape are checked once.
    """
    return find_fault(_errors(spec, backend), spec.dtype)


@torch.inference_mode()
def _errors(spec: StateSpec, backend: StateBackend) -> Iterator[tuple[str, float]]:
    for layer in dict.fromkeys(replace(layer, index=0) for layer in spec.layers):
        caches, steps = check_steps(replace(spec, layers=[layer]))
        for number, inputs in enumerate(steps):
            contexts = backend(caches[0], inputs), TorchStates(caches[1], inputs)
            conv, rule = state_calls(layer, inputs, spec.dtype, seed=number)
            outputs, expected = (computed(context, conv, rule) for context in contexts)
            for output, other in zip(outputs, expected, strict=True):
                yield f"recurrence of {layer}", relative_error(output, other)
        if layer.num_heads:
            states, others = (cache[0].states[1:].flatten(1) for cache in caches)
            is_written = others.any(dim=1)
            yield f"states of {layer}", relative_error(states[is_written], others[is_written])


def check_steps(spec: StateSpec) -> tuple[list[StateCache], list[BatchInputs]]:
    """Return two caches, and the inputs of the steps of a check."""
    schedule = list(state_schedule(spec.block_size))
    num_slots = max(item.state.target for items in schedule for item in items) + 3
    caches = [StateCache(spec.layers, num_slots, spec.block_size, spec.dtype, spec.device) for _ in "ab"]
    return caches, [build_inputs(items, spec.block_size, spec.device) for items in schedule]


def computed(context: StateContext, conv: ConvCall, rule: RuleCall | None) -> list[Tensor]:
    """Return the outputs of a layer's calls, one row for each token, in the dtype of the convolution's inputs."""
    outputs = [context.convolve(conv)]
    if rule is not None:
        outputs.append(context.advance(rule).flatten(1).to(conv.inputs.dtype))
    return outputs


def state_schedule(block_size: int) -> Iterator[list[ScheduledSequence]]:
    """Yield items of steps, each with the slots that the engine would give it. The last sequence shares a slot."""
    size = block_size
    ends = (
        (1, 2, 3, size - 1, size, size + 1, 3 * size + 2),
        (3 * size + 3, 3 * size + 4, 4 * size, 4 * size + 1, 4 * size + 3, 6 * size + 1, 6 * size + 2),
        (size, size + 1, 2 * size - 1, 2 * size, 2 * size + 2, 3 * size, 3 * size + 1),
    )
    held: list[tuple[int, int, int]] = [(0, 0, 0)] * len(ends)  # position, boundary and slot
    num_taken = 0
    shared = 0
    for number in range(len(ends[0])):
        items = []
        for index, of_sequence in enumerate(ends):
            start, boundary, source = held[index]
            end = max(start + 1, of_sequence[number])
            reached = end - end % size
            target, snapshots = source, []
            if start == 0 or reached != boundary:
                num_taken += 1
                target = num_taken
                for kept in range(start - start % size + size, reached, size)[:2]:
                    num_taken += 1
                    snapshots.append((kept, num_taken))
            held[index] = (end, reached, target)
            items.append(_item(start, end, size, StateMove(source, target, tuple(snapshots))))
            shared = target if end == size else shared
        if number in (1, 3):
            num_taken += 1
            items.append(_item(size, size + 1 if number == 1 else 2 * size + 3, size, StateMove(shared, num_taken)))
        yield items


def _item(start: int, end: int, block_size: int, state: StateMove) -> ScheduledSequence:
    return replace(dummy_item(start, end - start, block_size), state=state)


def state_calls(
    layer: StateLayer, inputs: BatchInputs, dtype: torch.dtype, seed: int
) -> tuple[ConvCall, RuleCall | None]:
    """Return random calls of a layer for the tokens of `inputs`: the gated delta rule, or Mamba-2 for odd seeds."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, device = inputs.input_ids.shape[1], inputs.input_ids.device

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    conv = ConvCall(
        0, draw(num_tokens, layer.num_channels), draw(layer.num_channels, layer.conv_width), None, has_silu=True
    )
    if not layer.num_heads:
        return conv, None
    query, key = (draw(num_tokens, layer.num_key_heads, layer.key_size) for _ in "qk")
    value = draw(num_tokens, layer.num_heads, layer.value_size)
    decay, beta = (draw(num_tokens, layer.num_heads) for _ in "ab")
    scale = layer.key_size**-0.5
    if seed % 2 == 0:
        gates = DeltaGates(draw(layer.num_heads).float(), draw(layer.num_heads).float())
        return conv, RuleCall(0, query, key, value, decay, beta, scale, has_norm=True, gates=gates)
    query, key, value, decay = (part.float() for part in (query, key, value, decay))
    return conv, RuleCall(0, query * scale, key * scale, value, -decay.abs(), None)
