"""A replica stays within its share of a GPU: weights, activations, graphs, workspaces and KV cache together."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from replicas.model.hardware.device_memory import MemoryShare, MemoryUse, measure_use
from testkit.model.simulated_gpu import OutOfMemory, SimulatedGpu, SimulatedProcess

GIB, MIB = 2**30, 2**20
UTILIZATION = 0.9


@dataclass(frozen=True)
class Model:
    """Bytes that a model takes at its steps and captures."""

    weights: int
    num_layers: int
    activations: int = 900 * MIB
    logits: int = 256 * 128_256 * 2
    graph_pool: int = 400 * MIB
    graph_code: int = 120 * MIB
    workspace: int = 32 * MIB
    context: int = 520 * MIB


SMALL, MIDDLE, LARGE = Model(2_472 * MIB, 16), Model(15 * GIB, 32), Model(100 * GIB, 80)
CARDS = [(16, SMALL), (24, MIDDLE), (80, MIDDLE), (141, LARGE)]


class Replica:
    """A replica's start on a simulated GPU, step by step."""

    def __init__(self, gpu: SimulatedGpu, model: Model, num_gpus: float, in_a_step: Callable[[], None] = lambda: None):
        self.process = gpu.start(model.context)
        self._model = model
        self._share = MemoryShare(UTILIZATION, num_gpus)
        self._in_a_step = in_a_step
        self._has_workspace = False
        self.process.allocate("weights", model.weights)

    def measure(self) -> MemoryUse:
        return measure_use(self.process, self._share, self._run_steps, self._capture)

    def serve(self) -> int:
        """Allocate the cache, capture the graphs and run the largest steps; return the bytes of the cache."""
        num_tensors = 2 * self._model.num_layers
        cache_bytes = self.measure().cache_bytes(num_tensors)
        assert cache_bytes > 0
        for number in range(num_tensors):
            self.process.allocate(f"cache {number}", cache_bytes // num_tensors)
        self._kept = self._capture()
        self._run_steps()
        return cache_bytes

    def _run_steps(self) -> None:
        for name in ("step", "another step"):
            self.process.allocate(name, self._model.activations)
            self._in_a_step()
            self.process.free(name)

    def _capture(self) -> object:
        if not self._has_workspace:  # One per stream, and the stream of all captures is one.
            self.process.allocate("workspace", self._model.workspace)
            self._has_workspace = True
        return _Graphs(self.process, self._model)


class _Graphs:
    """Captured graphs, whose memory is freed with the last reference to them."""

    def __init__(self, process: SimulatedProcess, model: Model) -> None:
        self._process, self._tensors, self._code = process, list[str](), 0
        for name, num_bytes in (("graphs' logits", model.logits), ("graphs' pool", model.graph_pool)):
            process.allocate(name, num_bytes)
            self._tensors.append(name)
        process.take_beside_torch(model.graph_code)
        self._code = model.graph_code

    def __del__(self) -> None:
        self._process.free(*self._tensors)
        self._process.take_beside_torch(-self._code)


@pytest.mark.parametrize(("gibibytes", "model"), CARDS)
def test_everything_fits_the_share_of_the_card(gibibytes: int, model: Model) -> None:
    gpu = SimulatedGpu(gibibytes * GIB)
    others = gpu.start(700 * MIB)
    replica = Replica(gpu, model, num_gpus=1.0)
    replica.serve()
    used = replica.process.used + others.used
    assert 0.98 * UTILIZATION * gpu.total < used <= UTILIZATION * gpu.total


@pytest.mark.parametrize("gibibytes", [16, 24, 80, 141])
def test_two_replicas_on_half_a_gpu_get_half_each(gibibytes: int) -> None:
    gpu = SimulatedGpu(gibibytes * GIB)
    replicas = [Replica(gpu, SMALL, num_gpus=0.5)]
    replicas[0].serve()
    replicas.append(Replica(gpu, SMALL, num_gpus=0.5))
    replicas[1].serve()
    half = UTILIZATION * gpu.total / 2
    for replica in replicas:
        assert 0.95 * half < replica.process.used <= half


def test_replicas_that_start_together_measure_themselves_alone() -> None:
    gpu = SimulatedGpu(24 * GIB)
    started: list[Replica] = []

    def start_the_second() -> None:
        if not started:
            started.append(Replica(gpu, SMALL, num_gpus=0.5))

    first = Replica(gpu, SMALL, 0.5, start_the_second)
    first.serve()
    started[0].serve()
    half = UTILIZATION * gpu.total / 2
    for replica in (first, started[0]):
        assert 0.95 * half < replica.process.used <= half


def test_a_replica_takes_no_more_than_is_left_of_the_utilization() -> None:
    gpu = SimulatedGpu(24 * GIB)
    gpu.start(12 * GIB)
    replica = Replica(gpu, SMALL, num_gpus=0.5)
    replica.serve()
    assert replica.process.used + 12 * GIB <= UTILIZATION * gpu.total


def test_without_the_graphs_bytes_the_card_would_run_out() -> None:
    gpu = SimulatedGpu(16 * GIB)
    replica = Replica(gpu, SMALL, num_gpus=1.0)
    use = replica.measure()
    assert use.graphs >= SMALL.logits + SMALL.graph_pool + SMALL.graph_code
    replica.process.allocate("cache", gpu.free - use.graphs // 2)
    with pytest.raises(OutOfMemory):
        replica._capture()


def test_the_use_is_said_in_words() -> None:
    use = MemoryUse(3 * GIB, 512 * MIB, 520 * MIB, 10 * GIB)
    assert str(use) == (
        "leaves, after 3072 MiB for weights and activations, 512 MiB for CUDA graphs, 520 MiB for other uses, 10240 MiB"
    )
