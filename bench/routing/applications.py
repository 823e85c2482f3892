"""The applications that experiments run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.models import model_directory
from bench.routing.report import Options
from bench.serving import REAL, TIMED, Served, serving

_MODELS = Path("~/.cache/headway-bench/models")
_SMALL = "S"
_DEMO = "headway-demo"
_ON_CPU: dict[str, object] = {"device": "cpu", "num_threads": 1, "cpus_per_replica": 0.5}
# A replica that computes nothing needs no processor of its own, and no text.
_TIMED_SETTINGS: dict[str, object] = {"cpus_per_replica": 0.01, "detokenize": "false"}

COARSE_STREAMS: dict[str, object] = {"coalesce_interval_s": 0.5, "coalesce_tokens": 64}
"""For loads whose streams are not what is measured: sent in few pieces they leave the processor to what is."""


@contextlib.contextmanager
def timed(options: Options, **settings: object) -> Iterator[Served]:
    """The application over timed replicas."""
    merged = {"step_times": options.step_times, **_TIMED_SETTINGS, **settings, **options.settings}
    with serving(TIMED, merged, options.has_throughput_profile, options.checkout) as served:
        yield served


@contextlib.contextmanager
def demo(options: Options, **settings: object) -> Iterator[Served]:
    """The application over the bundled demo model on CPU, one thread a replica."""
    merged = {**_ON_CPU, **settings, **options.settings}
    with serving(REAL, merged, options.has_throughput_profile, options.checkout) as served:
        yield served


def small(options: Options, **settings: object) -> AbstractContextManager[Served]:
    """The same over random weights of a small model's shape, see `bench.models`: a step is mostly its arithmetic.

    In steps of at most 128 tokens: one of 512, the default, takes a third of a second on two cores.
    """
    model = model_directory(_MODELS.expanduser(), _SMALL)
    fixed = {"model": model, "dtype": "bfloat16", "num_threads": os.cpu_count() or 1, "max_num_batched_tokens": 128}
    return demo(options, **fixed, **settings)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of replica that experiments run on."""

    start: Callable[..., AbstractContextManager[Served]]
    model: str = _DEMO
    """What requests call it."""


KINDS: Mapping[str, Kind] = {"timed": Kind(timed), "small": Kind(small, _SMALL), "demo": Kind(demo)}
