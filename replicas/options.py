"""Options of one model replica, composed of those of its parts. The module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.settings import check_bounds, setting


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Grouping of a stream's tokens into chunks."""

    coalesce_interval_s: float = setting(0.03, ge=0)
    """Shortest time between two chunks of a stream after its first, seconds; 8 waiting tokens end it early."""
    coalesce_tokens: int = 8
    """Number of waiting tokens at which a chunk is sent before `coalesce_interval_s` is over."""
    max_stream_chunks_per_s: float | None = setting(None, gt=0)
    """Most chunks per second of all streams of a replica together. Above it chunks get larger and rarer, and
    less urgent streams are slowed down first. None: 2,000 with a GPU, 25 for each processor without."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of one model replica."""

    model: ModelOptions
    runner: RunnerOptions = field(default_factory=RunnerOptions)
    limits: EngineLimits = field(default_factory=EngineLimits)
    streams: StreamOptions = field(default_factory=StreamOptions)

    def with_gpus(self, num_gpus: float) -> ReplicaOptions:
        """Return the options of a replica that was given `num_gpus` GPUs.

        Without one, the device `auto` is the CPU: a GPU that the process can see nevertheless belongs to others.
        """
        device = "cpu" if self.model.device == "auto" and num_gpus == 0 else self.model.device
        return replace(self, model=replace(self.model, device=device), runner=replace(self.runner, num_gpus=num_gpus))
