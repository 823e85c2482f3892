"""Prometheus metrics of the router."""

import pickle
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from replicas.protocol import Auto, Band
from router.types import LatencyTargets, Outcome, Reason
from serve_app.monitoring.families import families_of_process
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.page import exposition
from serve_app.monitoring.router import RouterMetrics

TARGETS = {
    Band.INTERACTIVE: LatencyTargets(ttft_s=1.0, tpot_s=0.1),
    Band.STANDARD: LatencyTargets(ttft_s=5.0),
    Band.BATCH: LatencyTargets(),
}


class Page:
    """Router metrics, and the values that they show."""

    def __init__(self, targets: Mapping[Band, LatencyTargets] = TARGETS) -> None:
        self._registry = CollectorRegistry()
        self.metrics = RouterMetrics(self._registry, targets)

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, labels)

    def attained(self, band: str) -> list[float | None]:
        return [self.value("headway:slo_attained_total", band=band, slo=slo) for slo in ("ttft", "tpot", "all")]


@pytest.fixture
def page() -> Page:
    return Page()


def test_attainment_is_of_the_requests_that_ended_well(page: Page) -> None:
    page.metrics.finished(Band.INTERACTIVE, 0.5, 1.5, 11)
    page.metrics.finished(Band.INTERACTIVE, 0.5, 3.0, 11)
    page.metrics.finished(Band.INTERACTIVE, 2.0, 3.0, 11)
    page.metrics.finished(Band.INTERACTIVE, 2.0, 9.0, 11)
    assert page.value("headway:finished_requests_total", band="interactive") == 4
    assert page.attained("interactive") == [2, 2, 1]
    assert page.value("headway:finished_tokens_total", band="interactive") == 44
    assert page.value("headway:goodput_tokens_total", band="interactive") == 11


def test_a_target_without_a_number_is_the_replicas() -> None:
    page = Page({band: LatencyTargets(1.0, Auto.AUTO) for band in Band})
    for auto_tpot_s in (0.05, 0.15, None):
        page.metrics.finished(Band.INTERACTIVE, 0.5, 1.5, 11, auto_tpot_s)
    assert page.attained("interactive") == [3, 2, 2], "100 ms: above 50, below 150, and nothing to miss"


def test_bands_have_targets_of_their_own(page: Page) -> None:
    for band in Band:
        page.metrics.finished(band, 4.0, 500.0, 11)
    assert [page.attained(band) for band in ("interactive", "standard", "batch")] == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    goodput = [page.value("headway:goodput_tokens_total", band=band) for band in ("interactive", "standard", "batch")]
    assert goodput == [0, 11, 11]


def test_decisions_are_counted_by_reason(page: Page) -> None:
    for reason in (Reason.PREFIX_HIT, Reason.PREFIX_HIT, Reason.AFFINITY):
        page.metrics.decided(reason)
    assert page.value("headway:router_decisions_total", reason="prefix_hit") == 2
    assert page.value("headway:router_decisions_total", reason="affinity") == 1


def test_series_are_zero_before_their_first_event(page: Page) -> None:
    assert all(page.value("headway:router_decisions_total", reason=reason.value) == 0 for reason in Reason)
    assert [page.attained(band.name.lower()) for band in Band] == [[0, 0, 0]] * 3
    for name in ("starvation_promotions", "finished_requests", "finished_tokens", "goodput_tokens"):
        assert [page.value(f"headway:{name}_total", band=band.name.lower()) for band in Band] == [0, 0, 0]
    for outcome in ("resumed", "restarted", "failed"):
        assert page.value("headway:migrations_total", outcome=outcome) == 0


def test_metrics_of_all_routers_share_their_families() -> None:
    registries, http = {"jobs-a": CollectorRegistry(), "jobs-b": CollectorRegistry()}, HttpMetrics("m")
    for registry, num_waits in ((http.registry, 1), (registries["jobs-a"], 2), (registries["jobs-b"], 3)):
        metrics = RouterMetrics(registry, TARGETS)
        for _ in range(num_waits):
            metrics.waited(Band.BATCH, Outcome.DISPATCHED, 0.3)
    # As they come from other processes.
    of_jobs = [family for name, registry in registries.items() for family in families_of_process(registry, name)]
    families = pickle.loads(pickle.dumps(tuple(of_jobs)))
    text = exposition([], "m", http, routers=families).decode()
    counts = {
        sample.labels.get("process"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "headway:queue_wait_seconds_count"
    }
    assert counts == {None: 1, "jobs-a": 2, "jobs-b": 3}
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
