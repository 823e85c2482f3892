"""Metrics at Ray: every one that Ray's dashboard of LLMs asks for, with the same numbers as on `/metrics`."""

import importlib.util
import random
import re
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from replicas.protocol import Band, HistogramMetric, Metric, MetricKind
from router.types import LatencyTargets, Outcome
from serve_app.monitoring.families import registry_metrics
from serve_app.monitoring.ray_metrics import RayExporter, engine_exporter, spread
from serve_app.monitoring.router import RouterMetrics
from testkit.engine.shadow_runner import World, config, request
from testkit.recorded_ray import RecordedRay

_ELSEWHERE = re.compile(r"ray_vllm_(nixl|kv_offload|external_prefix_cache)_")
"""Metrics of KV transfer and offload, which this engine does not have."""


def panel_metrics() -> set[str]:
    """Return the names that the LLM dashboard of the installed Ray asks for, but those of parts of other engines."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    names = set(re.findall(r"\bray_vllm_\w+", (folder / "serve_llm_dashboard_panels.py").read_text()))
    return {name for name in names if not _ELSEWHERE.match(name)}


def served() -> World:
    world = World(config(), step_s=0.1)
    world.run(*(request(str(number), (number, 1, 2, 3, 4, 5), max_tokens=3 + number) for number in range(5)))
    return world


async def test_every_metric_of_rays_dashboard_of_llms_is_exported() -> None:
    world, ray = served(), RecordedRay()
    await engine_exporter("m", world.engine.metrics, ray.instruments)()
    asked = panel_metrics()
    assert len(asked) > 15
    assert asked - ray.names() == set()
    assert all("model_name" in keys for keys in ray.tag_keys.values())


async def test_counters_and_histograms_pass_on_what_they_gained() -> None:
    world, ray = World(config(), step_s=0.1), RecordedRay()
    export = engine_exporter("m", world.engine.metrics, ray.instruments)
    for number in range(3):
        world.run(request(str(number), (number, 1, 2), max_tokens=4))
        await export()
        await export()
    assert ray.total("vllm_generation_tokens", model_name="m") == 12
    assert ray.total("vllm_request_success", finished_reason="length") == 3
    assert ray.total("vllm_num_requests_running") == 0
    for histogram in world.engine.metrics().histograms:
        name = histogram.name.replace(":", "_")
        if name not in ray.kinds:
            continue
        [values] = [values for (its, _), values in ray.values.items() if its == name] or [[]]
        assert len(values) == sum(histogram.counts)
        assert sum(values) == pytest.approx(histogram.sum, rel=1e-4, abs=1e-4)


def test_a_gauge_that_is_gone_is_zero() -> None:
    ray = RecordedRay()
    exporter = RayExporter("m", ray.instruments)
    size = Metric("headway:jobs", "", MetricKind.GAUGE, 4, (("state", "running"),))
    exporter.export([size], ())
    assert ray.total("headway_jobs", state="running") == 4
    exporter.export([], ())
    assert ray.total("headway_jobs", state="running") == 0


def test_an_infinite_gauge_is_not_zero() -> None:
    """OpenTelemetry, by which Ray exports, takes finite values alone."""
    ray = RecordedRay()
    exporter = RayExporter("m", ray.instruments)
    drain = Metric("headway:autoscale_drain_seconds", "", MetricKind.GAUGE, float("inf"))
    exporter.export([drain], ())
    assert ray.total("headway_autoscale_drain_seconds") == 0 and not ray.values
    exporter.export([replace(drain, value=4.0)], ())
    exporter.export([drain], ())
    assert ray.total("headway_autoscale_drain_seconds") == 4


def test_tenants_are_added_up() -> None:
    ray = RecordedRay()
    sizes = [
        Metric("headway:queue_size", "", MetricKind.GAUGE, 2, (("band", "batch"), ("tenant", str(n)))) for n in range(9)
    ]
    RayExporter("m", ray.instruments).export(sizes, ())
    assert ray.tag_keys["headway_queue_size"] == ("model_name", "band")
    assert ray.total("headway_queue_size", band="batch") == 18


def test_the_routers_registry_is_exported() -> None:
    registry, ray = CollectorRegistry(), RecordedRay()
    metrics = RouterMetrics(registry, dict.fromkeys(Band, LatencyTargets()))
    for seconds in (0.02, 0.3, 700.0):
        metrics.waited(Band.BATCH, Outcome.DISPATCHED, seconds)
    metrics.finished(Band.BATCH, 0.1, 1.0, 7)
    RayExporter("m", ray.instruments).export(*registry_metrics(registry))
    assert ray.total("headway_finished_tokens", band="batch") == 7
    assert ray.total("headway_queue_wait_seconds", band="batch") == pytest.approx(700.32)
    assert ray.kinds["headway_queue_wait_seconds"] == "histogram"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(30))
def test_a_spread_has_the_buckets_and_the_sum_of_its_histogram(seed: int) -> None:
    rng = random.Random(seed)
    bounds = tuple(sorted(rng.uniform(0.001, 100) for _ in range(rng.randrange(1, 9))))
    observed: list[float] = []
    before = None
    for _ in range(3):
        observed += [rng.choice([rng.uniform(0, 120), *bounds]) for _ in range(rng.randrange(1, 9))]
        counts = [0] * (len(bounds) + 1)
        for value in observed:
            counts[bisect_left(bounds, value)] += 1
        histogram = HistogramMetric("h", "", bounds, tuple(counts), sum(observed))
        news = spread(histogram, before)
        found = [0] * len(counts)
        for value, number in news.items():
            found[bisect_left(bounds, value)] += number
        known = [0] * len(counts) if before is None else list(before.counts)
        assert [now - then for now, then in zip(counts, known, strict=True)] == found
        gained = histogram.sum - (0 if before is None else before.sum)
        assert sum(value * number for value, number in news.items()) == pytest.approx(gained, rel=1e-3)
        before = histogram
