"""The applications that experiments run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench.routing.report import Options
from bench.serving import REAL, TIMED, Served, serving

# A replica that computes nothing needs no processor of its own, and no text.
_TIMED_SETTINGS: dict[str, object] = {"cpus_per_replica": 0.01, "detokenize": "false"}

COARSE_STREAMS: dict[str, object] = {"coalesce_interval_s": 0.5, "coalesce_tokens": 64}
"""For loads whose streams are not what is measured: sent in few pieces they leave the processor to what is."""


@contextlib.contextmanager
def timed(options: Options, **settings: object) -> Iterator[Served]:
    """The application over timed replicas."""
    merged = {"step_times": options.step_times, **_TIMED_SETTINGS, **settings, **options.settings}
    with serving(TIMED, merged, options.has_throughput_profile) as served:
        yield served


@contextlib.contextmanager
def demo(options: Options, **settings: object) -> Iterator[Served]:
    """The application over the bundled demo model on CPU, one thread a replica."""
    merged = {"device": "cpu", "num_threads": 1, "cpus_per_replica": 0.5, **settings, **options.settings}
    with serving(REAL, merged, options.has_throughput_profile) as served:
        yield served
