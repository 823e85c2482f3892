"""Ranks of a model as threads of one process: real collectives, ring and runners, without the start of processes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from replicas.engine.engine import Engine
from replicas.model.cuda_graphs.graphs import PlannedAttention
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import Device, ModelOptions
from replicas.model.parallel.rank_group import RankGroup
from replicas.model.parallel.shares import Share
from replicas.model.ranks.leading_runner import FollowingRunner, LeadingRunner
from replicas.model.ranks.ring import RingFiles, RingReader, RingWriter
from replicas.model.runner import TorchModelRunner
from testkit.model.engine_runs import MAX_MODEL_LEN, Sizes, engine_over, make_runner

_LIMIT_S = 60.0
_PAUSE_S = 0.01

_Result = TypeVar("_Result")


def on_ranks(num_ranks: int, call: Callable[[int], _Result]) -> list[_Result]:
    """Return the results of `call` for each rank; all run at the same time."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(call, range(num_ranks)))


def load_parts(path: Path, num_ranks: int, device: Device = "cpu", **options: object) -> list[LoadedModel]:
    """Load the parts of a checkpoint in float32 on one device, without the C++ kernels unless `options` name them."""
    chosen = {"kernel_cache_dir": None, "dtype": "float32", "device": device, "max_model_len": MAX_MODEL_LEN, **options}
    with tempfile.TemporaryDirectory() as folder:

        def join(rank: int) -> _LoadingGroup:
            share, meeting_file = Share(rank, num_ranks), Path(folder, "meeting")
            return _LoadingGroup(share, torch.device(device), meeting_file, shares_device=num_ranks > 1)

        groups = on_ranks(num_ranks, join)
    # One after the other: transformers changes its classes while it loads.
    parts = [load_model(ModelOptions(str(path), **chosen), group) for group in groups]  # type: ignore[arg-type]
    for group in groups:
        group.is_loading = False
    return parts


class _LoadingGroup(RankGroup):
    """Group whose ranks have the same verdicts while they load, each by itself."""

    is_loading = True

    def all_true(self, verdict: bool) -> bool:
        """Return the rank's own verdict while it loads."""
        return verdict if self.is_loading else super().all_true(verdict)


@dataclass(frozen=True)
class Ranks:
    """Runners of all ranks over a ring, of which the first one leads."""

    parts: list[LoadedModel]
    sizes: Sizes
    runners: list[TorchModelRunner]
    leading: LeadingRunner

    def engine(self, *, is_ahead: bool = False) -> Engine:
        """Return an engine whose steps run on all ranks."""
        return engine_over(self.runners[0], self.parts[0], self.sizes, is_ahead=is_ahead, launcher=self.leading)


@contextmanager
def following(
    parts: list[LoadedModel],
    sizes: Sizes | None = None,
    make_reader: type[RingReader] = RingReader,
    planned: PlannedAttention | None = None,
) -> Iterator[Ranks]:
    """Let threads follow the first rank while the context lasts. Given `planned` attention, small steps are padded."""
    sizes = sizes or Sizes()
    runners = [make_runner(part, sizes, planned=planned) for part in parts]
    files, has_ended = RingFiles.create(len(parts) - 1), threading.Event()
    leading = LeadingRunner(runners[0], RingWriter(files), _LIMIT_S)

    def follow(runner: FollowingRunner) -> None:
        while not has_ended.is_set():
            runner.run_next(_PAUSE_S)

    followers = [FollowingRunner(runner, make_reader(files, reader)) for reader, runner in enumerate(runners[1:])]
    with ThreadPoolExecutor(len(followers)) as pool:
        running = [pool.submit(follow, follower) for follower in followers]
        try:
            yield Ranks(parts, sizes, runners, leading)
        finally:
            has_ended.set()
    for future in running:
        future.result()
    files.close()
