"""Selection of the attention backend of a runner, after checks against plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppAttention, CppTwoSidedAttention, can_attend
from replicas.model.attention.flash import FlashBackend
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionCall, AttentionContext, AttentionSpec, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.attention.two_sided import TwoSidedAttention
from replicas.model.batch.inputs import BatchInputs, build_inputs, dummy_item
from replicas.model.hardware.device import compute_capability
from replicas.model.hardware.selfcheck import Agree, agreed_fault, alone, find_fault, relative_error

if TYPE_CHECKING:
    from replicas.model.attention.triton import TritonBackend

_log = logging.getLogger(__name__)

_Backend = TypeVar("_Backend")

BACKENDS = ("auto", "flash", "triton", "gather")
# Processor counts for the check: with the first, no keys are split into parts; with the second, they are.
_FEW_PROCESSORS, _MANY_PROCESSORS = 0, 4096
# Keys of a part for the check of batch-invariant attention: so few that sequences have several parts.
_FEW_PART_KEYS = 64

ChunkSchedule = tuple[tuple[tuple[int, int], ...], ...]
"""Chunks [start, end) of each pass, one per sequence; earlier passes have computed the positions before them."""
_EARLIER = ((0, 3), (0, 299), (0, 37))
SHORT_SCHEDULE: ChunkSchedule = (
    _EARLIER,
    ((3, 4), (299, 300), (37, 75), (0, 20)),
    ((4, 5), (300, 301)),
    ((5, 6), (301, 330)),
)
TWO_SIDED_SCHEDULE: ChunkSchedule = (((0, 1),), ((0, 2), (0, 129), (0, 1), (0, 700), (0, 37)))
LONG_SCHEDULE: ChunkSchedule = (*SHORT_SCHEDULE, ((6, 7), (330, 1800)), ((7, 8), (1800, 1801)), ((8, 30), (1801, 1802)))


def choose_attention(spec: AttentionSpec, backend: str, agree: Agree = alone) -> AttentionBackend:
    """Return the backend of that name; for `auto` the fastest one that works for `spec`, on all ranks that `agree`.

    Raises:
        ModelLoadError: there is no such backend, or it is flash or triton and does not work here.
    """
    if backend not in BACKENDS:
        raise ModelLoadError(f"attention_backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if spec.is_batch_invariant and backend not in ("auto", "triton"):
        raise ModelLoadError(f"attention_backend is {backend!r}, and batch_invariant is true, which needs triton")
    if backend == "auto" and not spec.is_batch_invariant:
        return _fastest(spec, agree)
    if backend == "gather":
        return GatherAttention
    try:
        if backend == "flash":
            _refuse_flash(spec)  # Say so before kernels are compiled.
            triton = _triton(spec)
            return FlashAndTriton(_flash(spec, triton), triton)
        return _triton(spec)
    except ModelLoadError as error:
        setting = f"attention_backend is {backend!r}, which"
        if backend == "auto":  # It comes here with batch_invariant only.
            setting = "batch_invariant is true, which needs triton; that"
        raise ModelLoadError(f"{setting} does not work here: {error}") from error


def choose_two_sided(spec: AttentionSpec, backend: str) -> AttentionBackend:
    """Return the backend of that name for whole texts; for `auto` the fastest one that works for `spec`.

    Raises:
        ModelLoadError: it is flash, which has none, or triton, which does not work here.
    """
    if backend == "flash":
        raise ModelLoadError("attention_backend is 'flash', which has no two-sided attention")
    if backend == "auto" and spec.device.type != "cuda":
        return CppTwoSidedAttention if spec.has_kernels else TwoSidedAttention
    if backend == "gather":
        return TwoSidedAttention
    try:
        from replicas.model.attention.two_sided_triton import TritonTwoSided  # Only torch for CUDA installs Triton.
    except ImportError as error:
        fault: str | None = str(error)
    else:
        triton = TritonTwoSided(compute_capability(spec.device))
        fault = check_two_sided(spec, triton)
        if fault is None:
            return triton
    if backend == "triton":
        raise ModelLoadError(f"attention_backend is 'triton', which does not work here: {fault}")
    _log.warning("two-sided attention uses plain torch and is slow: Triton's kernel does not work here: %s", fault)
    return TwoSidedAttention


class FlashAndTriton:
    """`AttentionBackend` that runs batches with prompts in FlashAttention 3 and pure decodes in Triton's kernels.

    The tiles of the Triton kernels suit decodes, which have few query rows for each key. CUDA graphs are captured with
    the same kernels.
    """

    kernels = "FlashAttention 3 and Triton kernels"

    def __init__(self, flash: AttentionBackend, triton: TritonBackend) -> None:
        self._flash = flash
        self._triton = triton
        self.planned = triton.planned

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> AttentionContext:
        """Return the attention of the chunks of `inputs`."""
        has_prompts = any(chunk.num_tokens > 1 for chunk in inputs.chunks)
        return (self._flash if has_prompts else self._triton)(cache, inputs)


def _fastest(spec: AttentionSpec, agree: Agree) -> AttentionBackend:
    if spec.device.type != "cuda":
        return CppAttention if spec.has_kernels and can_attend(spec.layers) else GatherAttention
    triton, fault = _tried(lambda: _triton(spec), agree)
    if triton is None:
        _log.warning("attention uses plain torch and is slow: Triton's kernels do not work here: %s", fault)
        return GatherAttention
    flash, fault = _tried(lambda: _flash(spec, triton), agree)
    if flash is None:
        _log.info("attention uses Triton's kernels only, without FlashAttention 3: %s", fault)
        return triton
    return FlashAndTriton(flash, triton)


def _tried(make: Callable[[], _Backend], agree: Agree) -> tuple[_Backend | None, str | None]:
    """Return what `make` returns, if no rank raises ModelLoadError; else None, and the fault."""
    backend, fault = None, None
    try:
        backend = make()
    except ModelLoadError as error:
        fault = str(error)
    fault = agreed_fault(fault, agree)
    return (backend if fault is None else None), fault


def _flash(spec: AttentionSpec, triton: TritonBackend) -> AttentionBackend:
    """Return FlashAttention 3. Raises ModelLoadError if it is missing, does not support the device, or is wrong.

    Triton's kernel writes the keys and values: in one launch and in wide stores, unlike plain torch.
    """
    _refuse_flash(spec)
    backend = FlashBackend(spec.dtype, spec.device, triton.write)
    # The long schedule has block tables wide enough for FlashAttention to split the keys.
    _refuse_wrong(spec, [backend], LONG_SCHEDULE)
    return backend


def _refuse_flash(spec: AttentionSpec) -> None:
    """Raise ModelLoadError if FlashAttention 3 is missing, or does not support the device or a dtype of `spec`."""
    if spec.quantized_cache is not None:
        raise ModelLoadError("it does not read a KV cache in 8 bits")
    if any(layer.has_values_in_keys for layer in spec.layers):
        raise ModelLoadError("it does not read latent keys")
    if any(layer.window is not None and layer.window < spec.block_size for layer in spec.layers):
        raise ModelLoadError(f"it reads keys before a window that is shorter than a block of {spec.block_size} tokens")
    FlashBackend(spec.dtype, spec.device)


def _triton(spec: AttentionSpec) -> TritonBackend:
    """Return the backend of Triton's kernels. Raises ModelLoadError if Triton is not installed or the check fails."""
    try:
        # Only torch for CUDA installs Triton. Replicas on CPU run without it.
        from replicas.model.attention.triton import TritonBackend, fixed_part_keys
    except ImportError as error:
        raise ModelLoadError(str(error)) from error
    capability = compute_capability(spec.device)
    if spec.is_batch_invariant:
        part_keys = fixed_part_keys(spec.max_model_len)
        candidates = [TritonBackend(1, capability, keys) for keys in (_FEW_PART_KEYS, part_keys)]
    else:
        candidates = [TritonBackend(number, capability) for number in (_FEW_PROCESSORS, _MANY_PROCESSORS)]
    _refuse_wrong(spec, candidates, SHORT_SCHEDULE)
    return candidates[-1] if spec.is_batch_invariant else TritonBackend(_num_processors(spec.device), capability)


def _refuse_wrong(spec: AttentionSpec, candidates: Sequence[AttentionBackend], schedule: ChunkSchedule) -> None:
    fault = check_attention(spec, candidates, schedule)
    if fault is not None:
        raise ModelLoadError(fault)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs the programs one after the other.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_attention(
    spec: AttentionSpec, candidates: Sequence[AttentionBackend], schedule: ChunkSchedule = SHORT_SCHEDULE
) -> str | None:
    """Return a description of the first fault of one of `candidates`; None if there is none.

    The check compiles all kernels that serving needs. Unused cache slots hold NaN, so a candidate that reads them
    fails, even if it multiplies them by zero; and so does block 0, which is in the places of blocks behind a window.
    Layers of the same shape are checked once.
    """
    # Two implementations may round a number in 8 bits to different neighbours.
    return find_fault(_errors(spec, candidates, schedule), torch.bfloat16 if spec.quantized_cache else spec.dtype)


def check_two_sided(spec: AttentionSpec, candidate: AttentionBackend) -> str | None:
    """Return a description of the first fault of `candidate` over whole texts; None if there is none."""
    return find_fault(_two_sided_errors(spec, candidate), spec.dtype)


@torch.inference_mode()
def _two_sided_errors(spec: AttentionSpec, candidate: AttentionBackend) -> Iterator[tuple[str, float]]:
    cache = KVCache((), 0, spec.block_size, spec.dtype, spec.device)
    num_blocks = -(-max(end for texts in TWO_SIDED_SCHEDULE for _, end in texts) // spec.block_size)
    for layer in dict.fromkeys(replace(layer, index=0) for layer in spec.layers):
        for inputs, call in _calls(spec, layer, TWO_SIDED_SCHEDULE, num_blocks):
            contexts: tuple[AttentionContext, ...] = (candidate(cache, inputs), TwoSidedAttention(cache, inputs))
            output, expected = (context.attend(call).flatten(1) for context in contexts)
            yield f"two-sided {layer}", relative_error(output, expected)


@torch.inference_mode()
def _errors(
    spec: AttentionSpec, candidates: Sequence[AttentionBackend], schedule: ChunkSchedule
) -> Iterator[tuple[str, float]]:
    """Yield the relative error of each layer, candidate and pass, the largest over all tokens."""
    num_blocks = -(-max(end for chunks in schedule for _, end in chunks) // spec.block_size)
    num_sequences = max(len(chunks) for chunks in schedule)
    for layer in dict.fromkeys(replace(layer, index=0, kv_source=None) for layer in spec.layers):
        for candidate in candidates:
            tested, reference = (_new_cache(spec, layer, num_sequences * num_blocks, fill) for fill in (torch.nan, 0.0))
            for inputs, call in _calls(spec, layer, schedule, num_blocks):
                contexts: tuple[AttentionContext, ...] = (candidate(tested, inputs), GatherAttention(reference, inputs))
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
        items = [_item(spec, layer, index, chunk, num_blocks) for index, chunk in enumerate(chunks)]
        num_tokens = sum(item.num_tokens for item in items)
        key, value = (draw(num_tokens, layer.num_kv_heads, size) for size in (layer.key_size, layer.value_size))
        call = AttentionCall(
            layer=0,
            query=draw(num_tokens, layer.num_query_heads, layer.key_size),
            key=key,
            value=key[..., : layer.value_size] if layer.has_values_in_keys else value,
            scoring=Scoring(layer.key_size**-0.5, layer.softcap, sinks),
            window=layer.window,
            extras=frozenset(),
        )
        yield build_inputs(items, spec.block_size, spec.device), call


def _item(
    spec: AttentionSpec, layer: AttentionLayer, index: int, chunk: tuple[int, int], num_blocks: int
) -> ScheduledSequence:
    """Return a chunk [start, end) of sequence `index`. The sequence's block ids descend."""
    start, end = chunk
    item = dummy_item(start, end - start, spec.block_size)
    num_unseen = 0 if layer.window is None else max(0, start + 1 - layer.window) // spec.block_size
    item.sequence.block_table = [0 if i < num_unseen else num_blocks * (index + 1) - i for i in range(num_blocks)]
    return item


def _new_cache(spec: AttentionSpec, layer: AttentionLayer, num_blocks: int, fill: float) -> KVCache:
    cache = KVCache([layer], num_blocks, spec.block_size, spec.quantized_cache or spec.dtype, spec.device)
    for numbers, scales in cache[0].parts:
        (numbers if scales is None else scales).fill_(fill)
    return cache
