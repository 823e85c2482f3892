"""Protocol between the driver and an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bench.peers.workload import PeerRequest


class Events(NamedTuple):
    """Arrival times of the output tokens, in seconds of `time.perf_counter`."""

    token_s: dict[int, list[float]]
    """Arrival time of each token, by request number. Tokens that came together have the same time."""
    started_s: float
    ended_s: float


class PeerEngine(Protocol):
    """Engine with a model loaded."""

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Give the engine all `requests` at once; it runs at most `concurrency` together. Wait for the end."""
        ...

    def pids(self) -> list[int]:
        """Return the processes whose memory and CPU time count as the engine's."""
        ...

    def close(self) -> None:
        """Stop the engine and its processes."""
        ...


EngineFactory = Callable[[argparse.Namespace], PeerEngine]
"""Factory that loads `model` in `dtype` with `threads`; other arguments are specific to the engine."""
