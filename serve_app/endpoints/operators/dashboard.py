"""Dashboard: the events that feed its page and `headway top`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import ServingError
from replicas.protocol import Band, Metric
from router.flow.flow_queue import BandQueueSize
from serve_app.endpoints.event_stream import CONTENT_TYPE
from serve_app.endpoints.operators.load_objects import autoscaling_of, load_of
from serve_app.endpoints.operators.operations import Backends
from serve_app.endpoints.operators.stored import stored_object
from serve_app.http.exchange import exchange_of
from serve_app.http.gate import Gate
from serve_app.http.live_feed import LiveFeed
from serve_app.http.request_registry import Latency, RequestRegistry
from serve_app.http.streaming import ByteStream
from serve_app.jobs.api.records import BatchProgress, JobsService
from serve_app.jobs.api.responses import StoredSums
from serve_app.openai.reply.format import JsonObject
from serve_app.reference.answers import DashboardSnapshot
from serve_app.reference.operations import Access, Operation

_NUM_REQUESTS = 25
_NUM_TENANTS = 8
_LATENCY_WINDOW_S = 300.0
_JOBS_PERIOD_S = 5.0
_JOBS_LIMIT_S = 2.0


class Snapshots:
    """Maker of the dashboard's snapshots."""

    def __init__(self, model_name: str, backends: Backends, registry: RequestRegistry) -> None:
        self._model_name = model_name
        self._backends = backends
        self._registry = registry
        self._jobs: list[JsonObject] | None = None
        self._batches: list[JsonObject] = []
        self._stored: JsonObject | None = None
        self._jobs_asked_s = -_JOBS_PERIOD_S

    async def make(self) -> JsonObject:
        """Return what this ingress knows now; counts of jobs are up to `_JOBS_PERIOD_S` older."""
        await self._ask_jobs()
        dispatcher, autoscaling = self._backends.dispatcher, self._backends.autoscaling
        history = self._backends.history
        latencies = self._registry.latencies(_LATENCY_WINDOW_S)
        requests = self._registry.newest(_NUM_REQUESTS)
        choices = _choices_of(requests)
        return {
            "time_unix_s": round(time.time(), 3),
            "model": self._model_name,
            "replicas": [
                load_of(view) | {"chosen_for": choices.get(view.stats.replica_id)} for view in dispatcher.load()
            ],
            "queues": [_queue_of(band, dispatcher.waiting(band, _NUM_TENANTS)) for band in Band],
            "latencies": [self._latency_of(band, latencies[band]) for band in Band],
            "autoscaling": None if autoscaling is None else autoscaling_of(autoscaling),
            "history": [] if history is None else [asdict(sample) for sample in history.samples],
            "jobs": self._jobs,
            "batches": self._batches,
            "stored": self._stored,
            "requests": requests,
        }

    async def _ask_jobs(self) -> None:
        now = time.monotonic()
        if self._backends.jobs is None or now - self._jobs_asked_s < _JOBS_PERIOD_S:
            return
        self._jobs_asked_s = now
        try:
            async with asyncio.timeout(_JOBS_LIMIT_S):
                counts = await self._backends.jobs.client.call(JobsService.metrics)
        except (ServingError, TimeoutError):
            self._jobs, self._batches, self._stored = None, [], None
        else:
            # Those of what is stored are many, one for each tenant; `stored` has their sums.
            self._jobs = [_value_of(metric) for metric in counts.own if "stored" not in metric.name]
            self._batches = [_batch_of(batch) for batch in counts.running]
            self._stored = None if counts.stored is None else _stored_of(counts.stored)

    def _latency_of(self, band: Band, latencies: Sequence[Latency]) -> JsonObject:
        targets = self._backends.targets.get(band)
        ttft = [each.ttft_s for each in latencies]
        tpot = [each.tpot_s for each in latencies if each.tpot_s is not None]
        return {
            "band": band.name.lower(),
            "num_requests": len(latencies),
            "ttft_s": _percentiles(ttft),
            "tpot_s": _percentiles(tpot),
            "ttft_target_s": None if targets is None else targets.ttft_s,
            "tpot_target_s": None if targets is None else targets.known_tpot_s(self._auto_tpot_s(band)),
        }

    def _auto_tpot_s(self, band: Band) -> float | None:
        """Return the slowest replica's present target."""
        targets_s = [view.stats.tpot_targets_s[band] for view in self._backends.dispatcher.load()]
        return max((target_s for target_s in targets_s if target_s is not None), default=None)


class DashboardEndpoints:
    """Endpoint of the dashboard's events."""

    def __init__(self, snapshots: Snapshots, gate: Gate) -> None:
        self._feed = LiveFeed(snapshots.make, lambda: gate.is_staying)

    @Operation(
        "GET",
        "/dashboard/events",
        "Server",
        other_answers={"text/event-stream": (DashboardSnapshot,)},
        access=Access.OPERATOR,
        failures=frozenset({429}),
    )
    async def events(self, request: Request) -> Response:
        """Send a snapshot of the server's state each second, for the dashboard and `headway top`.

        The events end when the client leaves or the server stops.
        """
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return ByteStream(self._feed.events(), exchange_of(request), CONTENT_TYPE, headers)


def _choices_of(requests: Sequence[JsonObject]) -> dict[str, JsonObject]:
    """Return the most frequent reason for the placements of the requests, by replica."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for request in requests:
        for placed in request["metrics"]["placements"]:
            reasons[placed["replica_id"]][placed["reason"]] += 1
    return {
        replica_id: {"reason": reason, "num_placements": num, "of": counts.total()}
        for replica_id, counts in reasons.items()
        for reason, num in counts.most_common(1)
    }


def _queue_of(band: Band, size: BandQueueSize) -> JsonObject:
    """Return a band's queue, with the tenants that have most requests there."""
    return {
        "band": band.name.lower(),
        "num_requests": size.num_requests,
        "num_tokens": size.num_tokens,
        "num_tenants": size.num_tenants,
        "tenants": [
            {"tenant": tenant, "num_requests": queue.num_requests, "num_tokens": queue.num_tokens}
            for tenant, queue in size.largest.items()
        ],
    }


def _percentiles(values: Collection[float]) -> JsonObject | None:
    """Return the median and the 95th percentile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {name: round(ordered[int(share * (len(ordered) - 1))], 4) for name, share in (("p50", 0.5), ("p95", 0.95))}


def _batch_of(batch: BatchProgress) -> JsonObject:
    return {
        "id": batch.id,
        "tenant": batch.tenant,
        "num_lines": batch.counts.total,
        "num_completed": batch.counts.completed,
        "num_failed": batch.counts.failed,
        "has_webhook": batch.has_webhook,
    }


def _stored_of(sums: StoredSums) -> JsonObject:
    """Return the sizes of what is stored, with the tenants that have most bytes."""
    total, largest = sums.total, islice(sums.largest.items(), _NUM_TENANTS)
    return {
        "num_tenants": sums.num_tenants,
        "num_responses": total.num_responses,
        "num_conversations": total.num_conversations,
        "num_bytes": total.num_bytes,
        "oldest_response_at": None if total.oldest_unix_s is None else int(total.oldest_unix_s),
        "tenants": [stored_object(tenant, size) for tenant, size in largest],
    }


def _value_of(metric: Metric) -> JsonObject:
    return {"name": metric.name.removeprefix("headway:"), "labels": dict(metric.labels), "value": metric.value}
