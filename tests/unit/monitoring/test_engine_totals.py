"""Metrics of many engines taken together."""

from replicas.protocol import EngineMetrics, HistogramMetric, Metric, MetricKind
from serve_app.monitoring.engine_totals import EngineTotals
from testkit.engine.shadow_runner import World, config, request


def gauge(value: float, is_mean: bool) -> Metric:
    return Metric("name", "Help.", MetricKind.GAUGE, value, is_mean=is_mean)


def test_shares_are_means_and_counts_are_sums() -> None:
    for is_mean, expected in ((True, 2.0), (False, 6.0)):
        totals = EngineTotals()
        totals.add(*(EngineMetrics(str(value), (gauge(value, is_mean),), ()) for value in (1.0, 2.0, 3.0)))
        assert [metric.value for metric in totals.metrics()] == [expected]


def test_one_engine_is_its_own_total() -> None:
    world = World(config())
    world.add(request())
    world.run()
    metrics, totals = world.engine.metrics(), EngineTotals()
    totals.add(metrics)
    assert tuple(totals.metrics()) == metrics.metrics
    assert tuple(totals.histograms()) == metrics.histograms


def test_an_engine_with_other_buckets_is_left_out_of_a_distribution() -> None:
    totals = EngineTotals()
    for bounds, counts in (((1.0,), (1, 2)), ((1.0, 2.0), (5, 5, 5)), ((1.0,), (3, 4))):
        totals.add(EngineMetrics("r", (), (HistogramMetric("name", "Help.", bounds, counts, 1.0),)))
    [histogram] = totals.histograms()
    assert (histogram.counts, histogram.sum) == ((4, 6), 2.0)


def test_what_an_engine_shows_of_its_settings_is_no_sum() -> None:
    engine, totals = World(config()).engine, EngineTotals()
    totals.add(engine.metrics(), engine.metrics())
    summed = {metric.name: metric.value for metric in totals.metrics()}
    one = {metric.name: metric.value for metric in engine.metrics().metrics}
    for name in ("vllm:cache_config_info", "vllm:kv_cache_usage_perc", "headway:step_token_budget"):
        assert summed[name] == one[name]
