"""GPU whose memory is simulated: processes take pages of it, and torch keeps what they free until it is released."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.model.hardware.device_memory import MemoryState

PAGE_BYTES = 2 * 2**20


class OutOfMemory(Exception):
    """Allocation of more than the GPU has left."""


@dataclass(slots=True)
class SimulatedGpu:
    """GPU with `total` bytes, and the processes on it."""

    total: int
    processes: list[SimulatedProcess] = field(default_factory=list)

    @property
    def free(self) -> int:
        """Bytes that no process holds."""
        return self.total - sum(process.used for process in self.processes)

    def start(self, context_bytes: int) -> SimulatedProcess:
        """Start a process, whose CUDA context takes memory at once."""
        process = SimulatedProcess(self)
        self.processes.append(process)
        process.take_beside_torch(context_bytes)
        return process


@dataclass(slots=True)
class SimulatedProcess:
    """`DeviceMemory` of a process on a simulated GPU.

    Invariants: the tensors' pages are reserved. No process holds memory that another one holds.
    """

    gpu: SimulatedGpu
    beside_torch: int = 0
    reserved: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    peak: int = 0

    @property
    def used(self) -> int:
        """Bytes that the process holds."""
        return self.beside_torch + self.reserved

    @property
    def allocated(self) -> int:
        """Bytes of the tensors, in whole pages."""
        return sum(self.tensors.values())

    def allocate(self, name: str, num_bytes: int) -> None:
        """Allocate a tensor, from what torch has kept or else from the GPU."""
        pages = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        needed = self.allocated + pages - self.reserved
        if needed > self.gpu.free:
            raise OutOfMemory(f"{name} needs {needed} bytes; {self.gpu.free} are free")
        assert name not in self.tensors
        self.reserved += max(0, needed)
        self.tensors[name] = pages
        self.peak = max(self.peak, self.allocated)

    def free(self, *names: str) -> None:
        """Free tensors. torch keeps their memory."""
        for name in names:
            del self.tensors[name]

    def take_beside_torch(self, num_bytes: int) -> None:
        """Take memory that torch does not count, as the driver does."""
        if num_bytes > self.gpu.free:
            raise OutOfMemory(f"the driver needs {num_bytes} bytes; {self.gpu.free} are free")
        self.beside_torch += num_bytes

    def state(self) -> MemoryState:
        """Return the state as this process sees it."""
        return MemoryState(self.gpu.total, self.gpu.free, self.reserved, self.peak)

    def reset_peak(self) -> None:
        """Forget the peak until now."""
        self.peak = self.allocated

    def release(self) -> None:
        """Give back the memory that torch holds for later tensors."""
        self.reserved = self.allocated
