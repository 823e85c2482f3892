"""Which way of computing attention a runner gets."""

from __future__ import annotations

import logging

import torch

from replicas.model.cpp_attention import CppAttention, can_attend
from replicas.model.errors import ModelLoadError
from replicas.model.gather_attention import GatherAttention
from replicas.model.loader import LoadedModel
from replicas.model.runner import AttentionFactory

_log = logging.getLogger(__name__)


def choose_attention(loaded: LoadedModel, backend: str, block_size: int) -> AttentionFactory:
    """The backend that is asked for by name, or with `auto` the fastest that works for `loaded` on its device.

    Raises:
        ModelLoadError: triton was asked for and does not work here, or there is no such backend.
    """
    if backend not in ("auto", "triton", "gather"):
        raise ModelLoadError(f"attention_backend is {backend!r}; it must be auto, triton or gather")
    if backend == "triton" or (backend == "auto" and loaded.device.type == "cuda"):
        return _choose_triton(loaded, block_size, is_demanded=backend == "triton")
    if backend == "auto" and loaded.has_kernels and can_attend(loaded.layers):
        return CppAttention
    return GatherAttention


def _choose_triton(loaded: LoadedModel, block_size: int, is_demanded: bool) -> AttentionFactory:
    """Triton's kernels where they prove right; else plain torch, unless that would not be what was demanded."""
    try:
        # Triton comes with torch for CUDA only; whoever serves on a CPU does without it.
        from replicas.model.triton_attention import TritonBackend
        from replicas.model.triton_check import check_triton
    except ImportError as error:
        fault: str | None = str(error)
    else:
        fault = check_triton(loaded.layers, block_size, loaded.dtype, loaded.device)
        if fault is None:
            return TritonBackend(_num_processors(loaded.device))
    if is_demanded:
        raise ModelLoadError(f"attention_backend is 'triton', which does not work here: {fault}")
    _log.warning("attention runs in plain torch, slowly, as Triton's kernels do not work here: %s", fault)
    return GatherAttention


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs one program after another.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
