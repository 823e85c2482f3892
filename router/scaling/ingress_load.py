"""Load of one ingress, from which the number of ingresses follows."""

from __future__ import annotations

from collections.abc import Callable

from replicas.timing.rates import SlidingRate

INGRESS_LOAD = "headway_ingress_load"
"""Name of the metric that Serve's controller gets from an ingress: its load, as a share of its targets."""
_MAX_CORES = 0.7
"""Processor time of an ingress that counts as a load of 1, in cores: one process hardly uses more than one core."""
_WINDOW_S = 10.0
_RESOLUTION_S = 0.5


class IngressLoadMeter:
    """Meter of one ingress's load: 1 if either the requests that it answers or its processor time is at its target.

    The processor time is the mean over the last 10 s.
    """

    def __init__(
        self, target_streams: int, num_streams: Callable[[], int], clock: Callable[[], float],
        cpu_time: Callable[[], float],
    ) -> None:  # fmt: skip
        """`clock` gives monotonic seconds, `cpu_time` the seconds of processor time of the process."""
        self._target_streams = target_streams
        self._num_streams = num_streams
        self._clock = clock
        self._cpu_time = cpu_time
        self._read_s, self._cpu_s = clock(), cpu_time()
        self._cores = SlidingRate(_WINDOW_S, self._read_s, _RESOLUTION_S)

    def load(self) -> float:
        """Return the load now."""
        now, cpu_s = self._clock(), self._cpu_time()
        self._cores.add(cpu_s - self._cpu_s, now, now - self._read_s)
        self._read_s, self._cpu_s = now, cpu_s
        return max(self._num_streams() / self._target_streams, self._cores.per_s(now) / _MAX_CORES)
