"""Generator of docs/metrics.md: `python -m testkit.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from replicas.protocol import HistogramMetric, Metric
from serve_app.monitoring.engines import engine_parts
from serve_app.monitoring.families import plain_families
from testkit.recorded_ray import RecordedRay, export_all
from testkit.whole_metrics import MODEL, WholeMetrics, whole_metrics

_INTRODUCTION = """# Metrics

`GET /metrics` of an ingress is a page for Prometheus: metrics of the ingress, of every engine and of the jobs process.
Names with `vllm:` are vLLM's, with its units and buckets. Counters and
histograms also have `x_created`, the unix time at which they began to count.

Each process also gives its metrics to Ray every 5 s, except those with *. Ray's exporter calls `vllm:x` and `headway:x`
`ray_vllm_x` and `ray_headway_x`. It has the labels `application`, `deployment`, `replica` and `WorkerId`, but neither
`engine` nor `tenant`. It cannot show an infinite gauge, and keeps the last finite value instead. A counter appears
there with its first event. The sum of a histogram is an estimate there, its buckets and count are exact.
[Operating](operating.md#prometheus-and-grafana) says how Prometheus finds both.

This page is made from the code: `python -m testkit.metrics_page > docs/metrics.md`.
"""
_TITLES = {
    "engines": """Engines

Of each engine. Every metric has the labels `model_name` and `engine`, the index in the sorted ids of the replicas.
Above 32 engines their sums have `engine="all"`.""",
    "router": """Ingresses and the router

Of the ingress that answers. A jobs worker routes lines of batches, too: its values have the label
`process="jobs"` (of several workers `jobs-<id>`), and at Ray's exporter the deployment `Jobs`.""",
    "http": """HTTP

Of the ingress that answers, with the names and labels of prometheus-fastapi-instrumentator. Ray Serve has metrics of
its own for HTTP (`ray_serve_http_*`).""",
    "jobs": """Jobs and batches

Of the jobs process, which gives them to Ray every 5 s.""",
}
_HEAD = "| metric | type | labels | unit | meaning |\n|---|---|---|---|---|"
_UNITS = (
    (r"start_time_seconds$", "unix s"),
    (r"seconds", "s"),
    (r"bytes", "bytes"),
    (r"tokens|prefix_cache_(queries|hits)|step_token_budget", "tokens"),
    (r"perc$|efficiency|utilization", "share, 0 to 1"),
)


@dataclass(frozen=True)
class MetricRow:
    """Row of the page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str
    name_at_ray: str | None
    """Name at Ray's exporter; None: it is not there."""

    def line(self, common: Collection[str]) -> str:
        """Return the row in Markdown, without the labels that all rows of its table have."""
        labels = ", ".join(f"`{label}`" for label in self.labels if label not in common) or "–"
        mark = " *" if self.name_at_ray is None else ""
        return f"| `{self.name}`{mark} | {self.kind} | {labels} | {self.unit} | {self.meaning} |"


async def sections() -> dict[str, list[MetricRow]]:
    """Return the rows by the part of the application that counts them."""
    whole = await whole_metrics()
    exported = await export_all(whole)
    own = list(whole.http.registry.collect())
    engines = b"".join(engine_parts({"0": [whole.engine]}, MODEL)).decode()
    families: dict[str, Iterable[Family]] = {
        "engines": text_string_to_metric_families(engines),
        "router": [*(family for family in own if ":" in family.name), *_of_page_alone(whole)],
        "http": [family for family in own if ":" not in family.name],
        "jobs": plain_families(whole.jobs.own),
    }
    return {
        title: [_row(family, exported) for family in of_part if not family.name.endswith("_created")]
        for title, of_part in families.items()
    }


async def page() -> str:
    """Return the page: one table for each part of the application."""
    lines = [line for title, rows in (await sections()).items() for line in _section(title, rows)]
    return "\n".join([_INTRODUCTION, *lines])


def _of_page_alone(whole: WholeMetrics) -> Iterator[Family]:
    """Yield the families that belong to the page itself."""
    parts: tuple[Metric | HistogramMetric, ...] = (
        *whole.engine.metrics,
        *whole.engine.histograms,
        *whole.jobs.own,
    )
    known = {part.name for part in parts} | {family.name for family in whole.http.registry.collect()}
    for family in text_string_to_metric_families(whole.page()):
        if family.name not in known and not family.name.endswith("_created"):
            yield family


def _section(title: str, rows: Iterable[MetricRow]) -> Iterator[str]:
    common = set.intersection(*(set(row.labels) for row in rows))
    yield f"## {_TITLES[title]}\n\n{_HEAD}"
    yield from (row.line(common) for row in rows)
    yield ""


def _row(family: Family, ray: RecordedRay) -> MetricRow:
    suffix = "_total" if family.type == "counter" else ""
    labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
    name, at_ray = family.name + suffix, family.name.replace(":", "_")
    return MetricRow(
        name,
        family.type,
        tuple(labels),
        next((unit for pattern, unit in _UNITS if re.search(pattern, family.name)), "1"),
        _sentence(family.documentation),
        f"ray_{at_ray}{suffix}" if at_ray in ray.kinds else None,
    )


def _sentence(text: str) -> str:
    text = " ".join(text.split()).rstrip(".").replace("|", "\\|")
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    print(asyncio.run(page()), end="")
