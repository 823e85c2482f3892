"""Which way of computing attention a runner gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from replicas.model.attention import AttentionContext
from replicas.model.attention_check import LONG_PASSES, SHORT_PASSES, AttentionProblem, Passes, check_attention
from replicas.model.batch_inputs import BatchInputs
from replicas.model.cpp_attention import CppAttention, can_attend
from replicas.model.errors import ModelLoadError
from replicas.model.flash_attention import FlashBackend
from replicas.model.gather_attention import GatherAttention
from replicas.model.kv_cache import KVCache
from replicas.model.loader import LoadedModel
from replicas.model.runner import AttentionFactory

if TYPE_CHECKING:
    from replicas.model.triton_attention import TritonBackend

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "triton", "gather")
# Of pretended devices: on one no keys are divided into parts, on the other all.
_FEW_PROCESSORS, _MANY_PROCESSORS = 0, 4096


def choose_attention(loaded: LoadedModel, backend: str, block_size: int) -> AttentionFactory:
    """The backend that is asked for by name, or with `auto` the fastest that works for `loaded` on its device.

    Raises:
        ModelLoadError: flash or triton was asked for and does not work here, or there is no such backend.
    """
    if backend not in BACKENDS:
        raise ModelLoadError(f"attention_backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    problem = AttentionProblem(loaded.layers, block_size, loaded.dtype, loaded.device)
    if backend == "auto":
        return _fastest(loaded, problem)
    if backend == "gather":
        return GatherAttention
    try:
        return FlashAndTriton(_flash(problem), _triton(problem)) if backend == "flash" else _triton(problem)
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


def _fastest(loaded: LoadedModel, problem: AttentionProblem) -> AttentionFactory:
    if loaded.device.type != "cuda":
        return CppAttention if loaded.has_kernels and can_attend(loaded.layers) else GatherAttention
    try:
        triton = _triton(problem)
    except ModelLoadError as error:
        _log.warning("attention runs in plain torch, slowly, as Triton's kernels do not work here: %s", error)
        return GatherAttention
    try:
        return FlashAndTriton(_flash(problem), triton)
    except ModelLoadError as error:
        _log.info("attention runs in our own kernels alone: %s", error)
    return triton


def _flash(problem: AttentionProblem) -> AttentionFactory:
    """FlashAttention 3; raises ModelLoadError where it is not installed, not made for the device, or proves wrong."""
    backend = FlashBackend(problem.dtype, problem.device)
    # Tables as wide as the longer passes' have it divide the keys.
    _refuse_wrong(problem, [backend], LONG_PASSES)
    return backend


def _triton(problem: AttentionProblem) -> TritonBackend:
    """Triton's kernels; raises ModelLoadError where they are not installed or prove wrong."""
    try:
        # Triton comes with torch for CUDA only; whoever serves on a CPU does without it.
        from replicas.model.triton_attention import TritonBackend
    except ImportError as error:
        raise ModelLoadError(str(error)) from error
    _refuse_wrong(problem, [TritonBackend(number) for number in (_FEW_PROCESSORS, _MANY_PROCESSORS)], SHORT_PASSES)
    return TritonBackend(_num_processors(problem.device))


def _refuse_wrong(problem: AttentionProblem, candidates: Sequence[AttentionFactory], passes: Passes) -> None:
    fault = check_attention(problem, candidates, passes)
    if fault is not None:
        raise ModelLoadError(fault)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs one program after another.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
