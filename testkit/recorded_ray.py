"""Ray's metrics without Ray: they remember what they are given, and demand what Ray demands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from replicas.protocol import Metric
from serve_app.monitoring.ray_metrics import Instruments, engine_exporter, jobs_exporter, registry_exporter
from testkit.whole_metrics import MODEL, WholeMetrics

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_sum", "_count", "_bucket")}


class RecordedRay:
    """Ray's metrics, which remember what they are given."""

    def __init__(self) -> None:
        self.instruments = Instruments(self.counter, self.gauge, self.histogram)
        self.kinds: dict[str, str] = {}
        self.tag_keys: dict[str, tuple[str, ...]] = {}
        self.bounds: dict[str, list[float]] = {}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = defaultdict(list)

    def counter(self, name: str, description: str, tag_keys: tuple[str, ...]) -> _Instrument:
        return self._instrument("counter", name, tag_keys)

    def gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> _Instrument:
        return self._instrument("gauge", name, tag_keys)

    def histogram(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: list[float]) -> Any:
        assert min(boundaries) > 0, "as Ray demands"
        self.bounds[name] = boundaries
        return self._instrument("histogram", name, tag_keys)

    def _instrument(self, kind: str, name: str, tag_keys: tuple[str, ...]) -> _Instrument:
        assert ":" not in name and name not in self.kinds
        assert not {"deployment", "replica", "application"} & set(tag_keys), "Serve adds these"
        assert len(set(tag_keys)) == len(tag_keys)
        self.kinds[name], self.tag_keys[name] = kind, tag_keys
        return _Instrument(self, name)

    def names(self) -> set[str]:
        """Return the names that Ray's exporter shows."""
        return {shown for name in self.kinds for shown in self.names_of(name)}

    def names_of(self, name: str) -> set[str]:
        """Return the names that Ray's exporter shows of one metric."""
        return {f"ray_{name}{suffix}" for suffix in _SUFFIXES[self.kinds[name]]}

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of what a metric was given, over the series with these labels."""
        return sum(
            sum(values)
            for (its, tags), values in self.values.items()
            if its == name and labels.items() <= dict(tags).items()
        )


class _Instrument:
    def __init__(self, ray: RecordedRay, name: str) -> None:
        self._ray, self._name = ray, name

    def _series(self, tags: dict[str, str]) -> list[float]:
        assert tags.keys() == set(self._ray.tag_keys[self._name])
        return self._ray.values[self._name, tuple(sorted(tags.items()))]

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "as Ray demands"
        self._series(tags).append(value)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._series(tags)[:] = [value]

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self._series(tags).append(value)


async def export_all(whole: WholeMetrics) -> RecordedRay:
    """Return what each process gives to Ray."""

    async def read() -> Iterable[Metric]:
        return whole.jobs.own

    ray = RecordedRay()
    await engine_exporter(MODEL, lambda: whole.engine, ray.instruments)()
    await registry_exporter(MODEL, whole.http.registry, ray.instruments)()
    await jobs_exporter(MODEL, read, ray.instruments)()
    return ray
