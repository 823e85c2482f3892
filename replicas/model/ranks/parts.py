"""Parts of a model, loaded and warmed up by each rank in step with the others; the first rank leads them."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from replicas.engine.batch import ModelRunner
from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.build import build_fitted, warm_up
from replicas.model.hardware.device import choose_device
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model
from replicas.model.parallel.rank_group import RankGroup
from replicas.model.parallel.shares import Share
from replicas.model.ranks.leading_runner import LeadingRunner
from replicas.model.ranks.processes import RankOptions, RankProcesses, end_process
from replicas.model.ranks.ring import RingWriter
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.sampler import has_draw_kernel


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """Part of a model that one rank computes, or the whole, with a runner that is warm."""

    loaded: LoadedModel
    runner: TorchModelRunner
    limits: EngineLimits
    warm_step_s: float
    """Seconds that a few of the largest steps take once kernels are compiled."""
    launcher: ModelRunner
    """Runner for the engine: `runner`, or the one that leads all ranks."""


def load_part(options: RankOptions, ranks: RankGroup | None = None) -> LoadedPart:
    """Load and warm up the part of a model of one of `ranks`; None: the whole model.

    Raises:
        ModelLoadError: files or options cannot be used, or the KV cache does not fit.
        UnsupportedModel: the model's architecture cannot be served.
    """
    loaded = load_model(options.model, ranks)
    fitted = build_fitted(loaded, options.limits, options.runner)
    runner, limits = fitted.runner, fitted.limits
    if ranks is not None:
        _refuse_different(loaded, runner, ranks)
    if loaded.device.type != "cpu":
        warm_up(runner, limits)  # It may compile kernels.
    warmed_s = time.monotonic()
    warm_up(runner, limits)
    return LoadedPart(loaded, runner, limits, time.monotonic() - warmed_s, runner)


def joined_part(options: RankOptions, share: Share, meeting_file: Path) -> LoadedPart:
    """Join the other ranks, and load this rank's part of the model. See `load_part`."""
    group = RankGroup(share, _device_of(options, share.rank), meeting_file)
    part = load_part(options, group)
    group.all_true(True)  # The first rank plans no step before every rank is ready.
    return part


class _Start:
    """Start of the other ranks: the first one that is lost ends it, and after it the process."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Sentence about the first rank that was lost; None: none is."""
        self.group: RankGroup | None = None
        self.processes: RankProcesses | None = None
        """Processes, once the start is over."""

    def lost(self, reason: str) -> None:
        """Note that a rank was lost."""
        if self.processes is not None:
            self.processes.remove_files()
            end_process(reason)
        self.reason = self.reason or reason
        if self.group is not None:
            self.group.abort()

    def check(self) -> None:
        """Raise ModelLoadError if a rank was lost."""
        if self.reason is not None:
            raise ModelLoadError(self.reason)


def lead_ranks(options: RankOptions) -> LoadedPart:
    """Start the other ranks of a model in processes, load the first rank's part, and lead them. See `load_part`."""
    share, start = Share(0, options.model.tensor_parallel_size), _Start()
    device = _device_of(options, 0)
    processes = RankProcesses(options, share.num_ranks, start.lost)
    try:
        group = start.group = RankGroup(share, device, processes.meeting_file, start.check)
        part = load_part(options, group)
        leading = LeadingRunner(part.runner, RingWriter(processes.ring), options.limits.max_step_s)
        group.all_true(True)
    except Exception:
        processes.end()
        start.check()
        raise
    start.processes = processes
    return LoadedPart(part.loaded, part.runner, part.limits, part.warm_step_s, leading)


def _device_of(options: RankOptions, rank: int) -> torch.device:
    """Return the device of a rank; of the GPUs that the process sees, it is the one with the rank's number.

    Raises:
        ModelLoadError: there are fewer GPUs than ranks.
    """
    device = choose_device(options.model.device)
    if device.type != "cuda":
        return device
    needed, found = options.model.tensor_parallel_size, torch.cuda.device_count()
    if found < needed:
        raise ModelLoadError(f"tensor_parallel_size is {needed}, and the replica was given {found} GPUs")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _refuse_different(loaded: LoadedModel, runner: TorchModelRunner, ranks: RankGroup) -> None:
    """Raise ModelLoadError if a kernel works on some ranks alone: their tokens might differ by rounding."""
    layers, states = [type(module).__name__ for module in loaded.model.modules()], loaded.port.recurrent.backend
    name_of_states = getattr(states, "__name__", type(states).__name__)
    others = [runner.kernels, name_of_states, runner.counts_tokens, has_draw_kernel(loaded.device)]
    kernels = " ".join(map(str, (*layers, *others)))
    if not ranks.are_equal(zlib.crc32(kernels.encode())):
        raise ModelLoadError(
            f"the ranks have different kernels, rank {ranks.share.rank} {others}: some do not work there"
        )
