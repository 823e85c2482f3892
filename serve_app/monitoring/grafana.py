"""Dashboards for Grafana, declared once: one asks for metrics of `/metrics`, one for the same at Ray's exporter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

JsonObject = dict[str, Any]

_WIDTH = 24
_HEIGHT = 8
_PER_LINE = 4
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_NAMES = re.compile(r"\b(vllm|headway):")
_ENGINE = re.compile(r"\bengine\b")
_QUANTILES = (0.5, 0.9, 0.99)


class Source(Enum):
    """Source of the metrics, which is a target of Prometheus."""

    INGRESS = "headway"
    """`/metrics` of the ingresses, which show all engines and the jobs process."""
    RAY = "headway_ray"
    """Ray's exporters, one on each node."""


@dataclass(frozen=True, slots=True)
class Query:
    """Query of a panel with names and labels of `/metrics`, and the legend of its lines."""

    expr: str
    legend: str
    expr_at_ray: str | None = None
    """Query at Ray; None: the same one with Ray's names and labels."""

    def of(self, source: Source) -> Query:
        """Return the query for a source. At Ray an engine is a replica, and names have no colon."""
        if source is Source.INGRESS:
            return self
        expr = self.expr_at_ray or _ENGINE.sub("replica", _NAMES.sub(r"ray_\1_", self.expr))
        return Query(expr, _ENGINE.sub("replica", self.legend))


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel of lines over time."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    sources: tuple[Source, ...] = tuple(Source)
    """Sources that have its metrics."""


def _quantiles(metric: str, by: str = "", where: str = "") -> tuple[Query, ...]:
    labels = f"{by}, le" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket{where}[$__rate_interval]))"
    of_label = f" {{{{{by}}}}}" if by else ""
    return tuple(Query(f"histogram_quantile({q:g}, {rate})", f"p{q * 100:g}{of_label}") for q in _QUANTILES)


def _rates(metric: str, by: str, legend: str | None = None) -> Query:
    return Query(f"sum by ({by}) (rate({metric}[$__rate_interval]))", legend or f"{{{{{by}}}}}")


# An outcome has no series before its first wait.
_LOST = (
    'sum by (outcome) (rate(headway:queue_wait_seconds_count{outcome!~"Dispatched|RejectedCapacity"}'
    "[$__rate_interval]))"
)
_LOAD = (
    Panel(
        "Requests running and waiting, by replica",
        "Sequences in the engines' running batches and waiting queues.",
        "short",
        (
            Query("max by (engine) (vllm:num_requests_running)", "running {{engine}}"),
            Query("max by (engine) (vllm:num_requests_waiting)", "waiting {{engine}}"),
        ),
    ),
    Panel(
        "Queue size, by band",
        "Requests waiting in flow control, in all ingresses.",
        "short",
        (Query("sum by (band) (headway:queue_size) or sum by (band) (0 * headway:queue_tokens)", "{{band}}"),),
    ),
    Panel(
        "Queue wait, by band",
        "Time from arrival in flow control to dispatch.",
        "s",
        _quantiles("headway:queue_wait_seconds", "band", '{outcome="Dispatched"}'),
    ),
    Panel(
        "Requests refused and lost while waiting",
        "Requests answered with 429, by limit, and waits that ended without a dispatch.",
        "reqps",
        (
            _rates("vllm:admission_rejections_total", "reason", "429 {{reason}}"),
            Query(f"{_LOST} or on () vector(0)", "{{outcome}}"),
        ),
    ),
    Panel(
        "Tenants waiting, by band",
        "Tenants with a request in flow control.",
        "short",
        (Query("max by (band) (headway:queue_tenants)", "{{band}}"),),
    ),
    Panel(
        "Queue size, by tenant",
        "Requests in flow control of the ten tenants with most.",
        "short",
        (
            Query(
                "topk(10, sum by (band, tenant) (headway:queue_size)) or sum by (band) (0 * headway:queue_tokens)",
                "{{band}} {{tenant}}",
            ),
        ),
        (Source.INGRESS,),
    ),
)
_LATENCY = (
    Panel(
        "Time to first token",
        "Time from arrival to first output token, in the engines.",
        "s",
        _quantiles("vllm:time_to_first_token_seconds"),
    ),
    Panel(
        "Inter-token latency",
        "Time between two output tokens, in the engines.",
        "s",
        _quantiles("vllm:inter_token_latency_seconds"),
        (Source.INGRESS,),
    ),
    Panel(
        "Time per output token",
        "(last - first output token) / (output tokens - 1) of a request, in the engines.",
        "s",
        _quantiles("vllm:request_time_per_output_token_seconds"),
    ),
    Panel(
        "SLO attainment, by band",
        "Share of the successful requests that met a latency target of their band (settings *_target_s).",
        "percentunit",
        (
            Query(
                "sum by (band, slo) (rate(headway:slo_attained_total[$__rate_interval])) / on (band) group_left () "
                "sum by (band) (rate(headway:finished_requests_total[$__rate_interval]))",
                "{{band}} {{slo}}",
            ),
        ),
    ),
    Panel(
        "Goodput",
        "Output tokens of requests that met every target of their band, and of all successful requests.",
        "tokens/s",
        (
            _rates("headway:goodput_tokens_total", "band", "good {{band}}"),
            _rates("headway:finished_tokens_total", "band", "all {{band}}"),
        ),
    ),
    Panel(
        "Parts of the requests' time",
        "Seconds a second that completions spend in each part of their time: the mean number of requests in it.",
        "short",
        (_rates("headway:request_part_seconds_total", "part"),),
    ),
)
_ENGINES = (
    Panel(
        "KV cache usage, by replica",
        "Blocks held / blocks.",
        "percentunit",
        (Query("max by (engine) (vllm:kv_cache_usage_perc)", "{{engine}}"),),
    ),
    Panel(
        "Prefix hit rate, by replica",
        "Prompt tokens found in the prefix cache / looked up.",
        "percentunit",
        (
            Query(
                "max by (engine) (rate(vllm:prefix_cache_hits_total[$__rate_interval])) / "
                "max by (engine) (rate(vllm:prefix_cache_queries_total[$__rate_interval]))",
                "{{engine}}",
            ),
        ),
    ),
    Panel(
        "Preemptions, by replica",
        "Sequences preempted, to be recomputed.",
        "ops",
        (Query("max by (engine) (rate(vllm:num_preemptions_total[$__rate_interval]))", "{{engine}}"),),
    ),
    Panel(
        "Tokens computed in vain",
        "Tokens that were computed again, or for requests that were aborted or expired, by cause.",
        "tokens/s",
        (
            Query(
                "sum by (cause) (max by (cause, engine) (rate(headway:wasted_tokens_total[$__rate_interval])))",
                "{{cause}}",
            ),
        ),
    ),
)
_ROUTING = (
    Panel(
        "Routing decisions",
        "Requests dispatched, by the reason for the choice of replica.",
        "reqps",
        (_rates("headway:router_decisions_total", "reason"),),
    ),
    Panel(
        "Promotions, by band",
        "Dispatches of a band that had starved.",
        "reqps",
        (_rates("headway:starvation_promotions_total", "band"),),
    ),
    Panel(
        "Failover",
        "Requests whose replica was lost, by outcome: they went on elsewhere, began anew, or failed.",
        "reqps",
        (_rates("headway:migrations_total", "outcome"),),
    ),
    Panel(
        "Replicas",
        "Desired number of model replicas, and replicas whose engine runs.",
        "short",
        (
            Query("max(headway:autoscale_desired_replicas)", "desired"),
            Query("max(headway:engines)", "running", "count(max by (replica) (ray_vllm_num_requests_running))"),
        ),
    ),
    Panel(
        "Drain time",
        "Time in which the replicas could compute the waiting work without batch work; infinite without replicas.",
        "s",
        (Query("max(headway:autoscale_drain_seconds)", "drain"),),
    ),
    Panel(
        "Age of load reports",
        "Age of the oldest replica report by which an ingress routes.",
        "s",
        (Query("max by (replica) (headway:router_state_age_seconds)", "{{replica}}"),),
        (Source.INGRESS,),
    ),
)
_JOBS = (
    Panel(
        "Batches and jobs, by state",
        "Batches and jobs in the database that have not ended.",
        "short",
        (Query('max by (state) (headway:jobs{state=~"validating|in_progress|finalizing|cancelling"})', "{{state}}"),),
    ),
    Panel(
        "Lines of batches, by result",
        "Requests of batches and jobs that ended.",
        "reqps",
        (Query("max by (status) (rate(headway:batch_requests_total[$__rate_interval]))", "{{status}}"),),
    ),
    Panel(
        "Waiting lines are done in",
        "Tokens expected of waiting lines / tokens/s of the last minute; infinite where none ended.",
        "s",
        (Query("max(headway:batch_eta_seconds)", "all waiting lines"),),
    ),
    Panel(
        "Webhooks and storage",
        "Attempts to deliver webhooks, by outcome; storage is 1 while the database of jobs can be used.",
        "short",
        (
            Query("max by (outcome) (rate(headway:webhook_deliveries_total[$__rate_interval]))", "{{outcome}} / s"),
            Query("min(headway:jobs_storage_up)", "storage"),
        ),
    ),
)
ROWS = {
    "Load": _LOAD,
    "Latency and goodput": _LATENCY,
    "Engines": _ENGINES,
    "Routing, failover and scaling": _ROUTING,
    "Jobs and batches": _JOBS,
}


def dashboard(source: Source) -> JsonObject:
    """Return the dashboard whose queries a source answers, in Grafana's JSON."""
    where = {Source.INGRESS: "the ingresses' /metrics", Source.RAY: "Ray's exporters"}[source]
    title = {Source.INGRESS: "Headway", Source.RAY: "Headway (Ray)"}[source]
    return {
        "uid": source.value.replace("_", "-"),
        "title": title,
        "description": f"One Headway application, by the metrics of {where}.",
        "tags": ["headway", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable()]},
        "annotations": {"list": []},
        "panels": list(_panels(source)),
    }


def _panels(source: Source) -> Iterator[JsonObject]:
    panel_id, y = 1, 0
    for title, panels in ROWS.items():
        position = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        yield {"id": panel_id, "type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []}
        panel_id, y = panel_id + 1, y + 1
        shown = [panel for panel in panels if source in panel.sources]
        for start in range(0, len(shown), _PER_LINE):
            line = shown[start : start + _PER_LINE]
            width = _WIDTH // len(line)
            for index, panel in enumerate(line):
                yield _panel(panel, source, panel_id, {"h": _HEIGHT, "w": width, "x": index * width, "y": y})
                panel_id += 1
            y += _HEIGHT


def _panel(panel: Panel, source: Source, panel_id: int, position: JsonObject) -> JsonObject:
    defaults: JsonObject = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 0, "showPoints": "never"}}
    if panel.unit == "percentunit":
        defaults["max"] = 1
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(each.of(source) for each in panel.queries)
        ],
    }


def _datasource_variable() -> JsonObject:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }
