"""Selection of the attention backend of a runner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppAttention, can_attend
from replicas.model.attention.flash import FlashBackend
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionContext, AttentionSpec
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.selfcheck import LONG_SCHEDULE, SHORT_SCHEDULE, ChunkSchedule, check_attention
from replicas.model.batch.inputs import BatchInputs

if TYPE_CHECKING:
    from replicas.model.attention.triton import TritonBackend

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "triton", "gather")
# Processor counts for the check: with the first, no keys are split into parts; with the second, they are.
_FEW_PROCESSORS, _MANY_PROCESSORS = 0, 4096


def choose_attention(spec: AttentionSpec, backend: str) -> AttentionBackend:
    """Return the backend of that name; for `auto` the fastest one that works for `spec`.

    Raises:
        ModelLoadError: there is no such backend, or it is flash or triton and does not work here.
    """
    if backend not in BACKENDS:
        raise ModelLoadError(f"attention_backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return _fastest(spec)
    if backend == "gather":
        return GatherAttention
    try:
        return FlashAndTriton(_flash(spec), _triton(spec)) if backend == "flash" else _triton(spec)
    except ModelLoadError as error:
        raise ModelLoadError(f"attention_backend is {backend!r}, which does not work here: {error}") from error


class FlashAndTriton:
    """`AttentionBackend` that runs batches with prompts in FlashAttention 3 and pure decodes in Triton's kernels.

    The tiles of the Triton kernels suit decodes, which have few query rows for each key. CUDA graphs are captured with
    the same kernels.
    """

    def __init__(self, flash: AttentionBackend, triton: TritonBackend) -> None:
        self._flash = flash
        self._triton = triton
        self.planned = triton.planned

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> AttentionContext:
        """Return the attention of the chunks of `inputs`."""
        has_prompts = any(chunk.num_tokens > 1 for chunk in inputs.chunks)
        return (self._flash if has_prompts else self._triton)(cache, inputs)


def _fastest(spec: AttentionSpec) -> AttentionBackend:
    if spec.device.type != "cuda":
        return CppAttention if spec.has_kernels and can_attend(spec.layers) else GatherAttention
    try:
        triton = _triton(spec)
    except ModelLoadError as error:
        _log.warning("attention uses plain torch and is slow: Triton's kernels do not work here: %s", error)
        return GatherAttention
    try:
        return FlashAndTriton(_flash(spec), triton)
    except ModelLoadError as error:
        _log.info("attention uses Triton's kernels only, without FlashAttention 3: %s", error)
    return triton


def _flash(spec: AttentionSpec) -> AttentionBackend:
    """Return FlashAttention 3. Raises ModelLoadError if it is missing, does not support the device, or is wrong."""
    backend = FlashBackend(spec.dtype, spec.device)
    # The long schedule has block tables wide enough for FlashAttention to split the keys.
    _refuse_wrong(spec, [backend], LONG_SCHEDULE)
    return backend


def _triton(spec: AttentionSpec) -> TritonBackend:
    """Return the backend of Triton's kernels. Raises ModelLoadError if Triton is not installed or the check fails."""
    try:
        # Only torch for CUDA installs Triton. Replicas on CPU run without it.
        from replicas.model.attention.triton import TritonBackend
    except ImportError as error:
        raise ModelLoadError(str(error)) from error
    _refuse_wrong(spec, [TritonBackend(number) for number in (_FEW_PROCESSORS, _MANY_PROCESSORS)], SHORT_SCHEDULE)
    return TritonBackend(_num_processors(spec.device))


def _refuse_wrong(spec: AttentionSpec, candidates: Sequence[AttentionBackend], schedule: ChunkSchedule) -> None:
    fault = check_attention(spec, candidates, schedule)
    if fault is not None:
        raise ModelLoadError(fault)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs the programs one after the other.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
