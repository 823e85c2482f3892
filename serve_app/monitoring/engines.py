"""Metrics of the engines that answer an ingress, one by one or as sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from replicas.engine.stats import START_TIME
from replicas.errors import InvalidRequest
from replicas.protocol import EngineMetrics
from serve_app.monitoring.engine_totals import EngineTotals
from serve_app.monitoring.families import add_histogram, add_metric, text_of

MAX_ENGINES = 32
"""Most engines that the page shows one by one; above, it shows their sums."""
_SUMMED_AT_ONCE = 16


def engines_shown(engines: Iterable[EngineMetrics], number: int | None) -> dict[str, list[EngineMetrics]]:
    """Return the engines of each value of the label `engine`: one for each engine, or the value `all` for many.

    An engine's value is its index, from "0", in the sorted ids of the replicas that answered, so that all ingresses
    number the replicas in the same way. `number`: the one value to show; None: all.

    Raises:
        InvalidRequest: there is no engine `number`.
    """
    ordered = sorted(engines, key=lambda engine: engine.replica_id)
    if number is not None:
        if number >= len(ordered):
            answered = f"the engines are 0 to {len(ordered) - 1}" if ordered else "no engine has answered"
            raise InvalidRequest(f"engine is {number}; {answered}", "engine")
        return {str(number): [ordered[number]]}
    if len(ordered) > MAX_ENGINES:
        return {"all": ordered}
    return {str(index): [engine] for index, engine in enumerate(ordered)}


def engine_parts(shown: Mapping[str, Sequence[EngineMetrics]], model_name: str) -> Iterator[bytes]:
    """Yield one family for each metric name of the engines; each sample has the labels `model_name` and `engine`.

    Some parts are empty, so that the maker of a page can let others run between two of them.
    """
    families: dict[str, Family] = {}
    for name, engines in shown.items():
        totals = EngineTotals()
        for start in range(0, len(engines), _SUMMED_AT_ONCE):
            totals.add(*engines[start : start + _SUMMED_AT_ONCE])
            yield b""
        labels, metrics = {"model_name": model_name, "engine": name}, tuple(totals.metrics())
        start_unix_s = next((metric.value for metric in metrics if metric.name == START_TIME), None)
        for metric in metrics:
            add_metric(families, metric, labels, start_unix_s)
        for histogram in totals.histograms():
            family = families.setdefault(histogram.name, HistogramMetricFamily(histogram.name, histogram.help))
            add_histogram(family, histogram, labels, start_unix_s)
    for family in families.values():
        yield text_of(family)
