"""Page for Prometheus: the metrics of the engines, of the jobs workers and of this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family

from replicas.protocol import EngineMetrics
from serve_app.monitoring.engines import engine_parts, engines_shown
from serve_app.monitoring.families import text_of
from serve_app.monitoring.http import HttpMetrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def exposition(
    engines: Iterable[EngineMetrics],
    model_name: str,
    http: HttpMetrics,
    jobs: Iterable[Family] = (),
    routers: Iterable[Family] = (),
) -> bytes:
    """Return the page for Prometheus, in its text format."""
    return b"".join(page_parts(engines_shown(engines, None), model_name, http, jobs, routers))


def page_parts(
    shown: Mapping[str, Sequence[EngineMetrics]],
    model_name: str,
    http: HttpMetrics,
    jobs: Iterable[Family] = (),
    routers: Iterable[Family] = (),
) -> Iterator[bytes]:
    """Yield the page in parts, some of them empty, so that its maker can let others run between two of them.

    `jobs`: families of the jobs workers' own work; `routers`: those of the workers' routers.
    """
    yield from engine_parts(shown, model_name)
    num_engines = sum(map(len, shown.values()))
    answered = GaugeMetricFamily("headway:engines", "Engines that answered the scrape.", num_engines)
    for families in ([answered], jobs, ingress_families(http.registry, routers)):
        for family in families:
            yield text_of(family)


def ingress_families(registry: CollectorRegistry, jobs: Iterable[Family]) -> Iterator[Family]:
    """Yield this ingress's families, each with the samples of the jobs workers' families of the same name."""
    of_jobs: dict[str, list[Family]] = {}
    for family in jobs:
        of_jobs.setdefault(family.name, []).append(family)
    for family in registry.collect():
        for others in of_jobs.get(family.name, ()):
            family.samples += others.samples
        yield family
