"""Which way of computing attention a runner gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from replicas.errors import ModelLoadError
from replicas.model.attention import AttentionContext, AttentionFactory, AttentionSpec
from replicas.model.attention_check import LONG_PASSES, SHORT_PASSES, Passes, check_attention
from replicas.model.batch_inputs import BatchInputs
from replicas.model.cpp_attention import CppAttention, can_attend
from replicas.model.flash_attention import FlashBackend
from replicas.model.gather_attention import GatherAttention
from replicas.model.kv_cache import KVCache

if TYPE_CHECKING:
    from replicas.model.triton_attention import TritonBackend

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "triton", "gather")
# Of pretended devices: on one no keys are divided into parts, on the other all.
_FEW_PROCESSORS, _MANY_PROCESSORS = 0, 4096


def choose_attention(spec: AttentionSpec, backend: str) -> AttentionFactory:
    """Return the backend that is asked for by name, or with `auto` the fastest that works for `spec`.

    Raises:
        ModelLoadError: flash or triton was asked for and does not work here, or there is no such backend.
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
    """Batches with prompts in FlashAttention 3, those of decodes alone in Triton's kernels.

    A decode has few query rows for each key: our tiles fit them, and graphs are captured of the same kernels.
    """

    def __init__(self, flash: AttentionFactory, triton: TritonBackend) -> None:
        self._flash = flash
        self._triton = triton
        self.planned = triton.planned

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> AttentionContext:
        """Attention of the chunks of `inputs`."""
        has_prompts = any(chunk.num_tokens > 1 for chunk in inputs.chunks)
        return (self._flash if has_prompts else self._triton)(cache, inputs)


def _fastest(spec: AttentionSpec) -> AttentionFactory:
    if spec.device.type != "cuda":
        return CppAttention if spec.has_kernels and can_attend(spec.layers) else GatherAttention
    try:
        triton = _triton(spec)
    except ModelLoadError as error:
        _log.warning("attention runs in plain torch, slowly, as Triton's kernels do not work here: %s", error)
        return GatherAttention
    try:
        return FlashAndTriton(_flash(spec), triton)
    except ModelLoadError as error:
        _log.info("attention runs in our own kernels alone: %s", error)
    return triton


def _flash(spec: AttentionSpec) -> AttentionFactory:
    """FlashAttention 3; raises ModelLoadError where it is not installed, not made for the device, or proves wrong."""
    backend = FlashBackend(spec.dtype, spec.device)
    # Tables as wide as the longer passes' have it divide the keys.
    _refuse_wrong(spec, [backend], LONG_PASSES)
    return backend


def _triton(spec: AttentionSpec) -> TritonBackend:
    """Triton's kernels; raises ModelLoadError where they are not installed or prove wrong."""
    try:
        # Triton comes with torch for CUDA only; whoever serves on a CPU does without it.
        from replicas.model.triton_attention import TritonBackend
    except ImportError as error:
        raise ModelLoadError(str(error)) from error
    _refuse_wrong(spec, [TritonBackend(number) for number in (_FEW_PROCESSORS, _MANY_PROCESSORS)], SHORT_PASSES)
    return TritonBackend(_num_processors(spec.device))


def _refuse_wrong(spec: AttentionSpec, candidates: Sequence[AttentionFactory], passes: Passes) -> None:
    fault = check_attention(spec, candidates, passes)
    if fault is not None:
        raise ModelLoadError(fault)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs one program after another.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
