"""The applications that experiments run on, and what these leave to be said on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench.routing.report import Options
from bench.serving import REAL, TIMED, Served, serving
from serve_app.config import HeadwayConfig

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


def is_offered(setting: str) -> bool:
    """Whether the application has a setting of this name."""
    return setting in HeadwayConfig.model_fields


def without_missing(**settings: object) -> dict[str, object]:
    """The settings that the application has; the others are named on standard output."""
    missing = [name for name in settings if not is_offered(name)]
    if missing:
        print(f"the application has no {', '.join(missing)}: left out")
    return {name: value for name, value in settings.items() if is_offered(name)}
