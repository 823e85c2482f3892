"""Memory of a GPU: its state, and the part of it that a replica's KV cache may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_MEBIBYTE = 2**20
_CONTEXT_BYTES = 640 * _MEBIBYTE
"""Most bytes that a process takes beside torch's own: its CUDA context and the code of its kernels. A replica that
shares a GPU cannot tell its own from those of its neighbours."""
_GRAPH_CODE_BYTES = 256 * _MEBIBYTE
"""Most bytes that the driver takes for captured graphs, of a replica that shares a GPU."""
_PAGE_BYTES = 2 * _MEBIBYTE
"""Size of the pages in which torch reserves memory for a large tensor."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Bytes of a GPU's memory at one moment."""

    total: int
    free: int
    reserved: int
    """Memory that this process's torch holds, for tensors and for later ones."""
    peak: int
    """Most memory of this process's tensors at a time, since `reset_peak`."""

    @property
    def beside_torch(self) -> int:
        """Memory of other processes, and of this process's CUDA context."""
        return self.total - self.free - self.reserved


class DeviceMemory(Protocol):
    """Memory of one GPU, as one process sees it."""

    def state(self) -> MemoryState:
        """Return the present state, after all launched work."""

    def reset_peak(self) -> None:
        """Forget the peak until now."""

    def release(self) -> None:
        """Give back the memory that torch holds for later tensors."""


class CudaMemory:
    """`DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self) -> MemoryState:
        """Return the present state, after all launched work."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return MemoryState(total, free, reserved, torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        """Forget the peak until now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Give back the memory that torch holds for later tensors."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Part of a GPU that a replica may use."""

    utilization: float
    """Share of the memory for all replicas on the GPU together."""
    num_gpus: float
    """GPUs that the replica was given. It computes on one; of less than one it uses that part."""

    @property
    def is_whole(self) -> bool:
        """True if no other replica has a part of the GPU."""
        return not 0 < self.num_gpus < 1

    def bytes_of(self, total: int) -> int:
        """Return the bytes that the replica may use of `total`."""
        return int(total * self.utilization * (1.0 if self.is_whole else self.num_gpus))


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that a replica takes beside its KV cache."""

    peak: int
    """Weights, and the activations of the largest step."""
    graphs: int
    """Captured graphs, with their outputs and workspaces."""
    others: int
    """Memory beside torch: of the CUDA context, and of other processes if the replica has the whole GPU."""
    available: int
    """Bytes that are left."""

    def cache_bytes(self, num_tensors: int) -> int:
        """Return the bytes for a KV cache of `num_tensors` tensors, each of which takes whole pages of memory."""
        return self.available - num_tensors * _PAGE_BYTES

    def __str__(self) -> str:
        named = {"weights and activations": self.peak, "CUDA graphs": self.graphs, "other uses": self.others}
        parts = [f"{num_bytes / _MEBIBYTE:.0f} MiB for {name}" for name, num_bytes in named.items()]
        return f"leaves, after {', '.join(parts)}, {self.available / _MEBIBYTE:.0f} MiB"


def measure_use(
    memory: DeviceMemory, share: MemoryShare, run_steps: Callable[[], None], capture: Callable[[], object], /
) -> MemoryUse:
    """Measure what a replica takes beside its KV cache.

    The graphs are captured before the cache exists, and measured, because the cache takes all that is left. They are
    freed again: they refer to the cache by address.

    Args:
        memory: memory of the device, on which the weights are.
        share: the replica's part of it.
        run_steps: runs the largest steps.
        capture: captures the graphs and returns what keeps them.
    """
    memory.release()
    memory.reset_peak()
    run_steps()
    peak = memory.state().peak
    memory.release()
    before = memory.state()
    graphs = capture()
    memory.release()
    after = memory.state()
    del graphs
    memory.release()
    taken = after.beside_torch - before.beside_torch
    if not share.is_whole:
        taken = max(0, min(taken, _GRAPH_CODE_BYTES))
    graph_bytes = max(0, after.reserved - before.reserved + taken)
    others = before.beside_torch if share.is_whole else min(before.beside_torch, _CONTEXT_BYTES)
    available = share.bytes_of(before.total) - peak - graph_bytes - others
    # All replicas on the GPU together keep to its utilization, whatever they were given.
    together = int(before.total * share.utilization) - before.beside_torch - peak - graph_bytes
    return MemoryUse(peak, graph_bytes, others, min(available, together))
