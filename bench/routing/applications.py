"""Applications that experiments run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.engine.models import model_directory
from bench.routing.report import Options
from bench.routing.streams import Stream
from bench.serving import REAL, TIMED, serving
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

_MODELS = Path("~/.cache/headway-bench/models")
_SMALL = "S"
_DEMO = "headway-demo"
_ON_CPU: dict[str, object] = {"device": "cpu", "num_threads": 1, "cpus_per_replica": 0.5}
# A timed replica computes nothing: it needs no CPU of its own and no text.
_TIMED_SETTINGS: dict[str, object] = {"cpus_per_replica": 0.01, "detokenize": "false"}

INTERACTIVE = Stream(
    name="interactive",
    band="interactive",
    user="people",
    prompt=Lengths(16, 384, 96, 0.5),
    output=Lengths(8, 160, 40, 0.5),
)
"""Requests of people, beside which other work runs; each experiment gives them phases."""
COARSE_STREAMS: dict[str, object] = {"coalesce_interval_s": 0.5, "max_stream_chunks_per_s": 25}
"""Settings for loads whose streams are not measured: few large chunks leave the CPU to the measured work."""


def timed(options: Options, **settings: object) -> AbstractContextManager[Served]:
    """Serve the application over timed replicas."""
    return _serve(TIMED, options, {"step_times": options.step_times, **_TIMED_SETTINGS, **settings})


def demo(options: Options, **settings: object) -> AbstractContextManager[Served]:
    """Serve the application over the bundled demo model on CPU, one thread per replica."""
    return _serve(REAL, options, {"model": _DEMO, **_ON_CPU, **settings})


def small(options: Options, **settings: object) -> AbstractContextManager[Served]:
    """Serve the application over a small model of random weights, whose step is mostly arithmetic (`engine.models`).

    Steps have at most 128 tokens: a step of 512, the default, takes a third of a second on two cores.
    """
    model = model_directory(_MODELS.expanduser(), _SMALL)
    fixed = {"model": model, "dtype": "bfloat16", "num_threads": os.cpu_count() or 1, "max_num_batched_tokens": 128}
    return demo(options, **fixed, **settings)


def _serve(app: str, options: Options, settings: dict[str, object]) -> AbstractContextManager[Served]:
    return serving(app, {**settings, **options.settings}, options.has_throughput_profile, options.checkout)


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of replica that experiments run on."""

    start: Callable[..., AbstractContextManager[Served]]
    model: str = _DEMO
    """Model name in requests."""


KINDS: Mapping[str, Kind] = {"timed": Kind(timed), "small": Kind(small, _SMALL), "demo": Kind(demo)}
