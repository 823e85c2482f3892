"""JSON objects of the load of replicas and of autoscaling."""

from __future__ import annotations

from replicas.protocol import Band
from router.scaling.autoscaling_loop import AutoscalingLoop
from router.types import ReplicaView
from serve_app.openai.reply.format import JsonObject


def load_of(view: ReplicaView) -> JsonObject:
    """Return the last known load of a replica."""
    stats = view.stats
    return {
        "replica_id": stats.replica_id,
        "node_id": stats.node_id,
        "pid": stats.pid,
        "age_s": round(view.age_s, 3),
        "num_in_flight": view.num_in_flight,
        "num_slots": stats.num_slots,
        "num_running": stats.num_running,
        "num_running_by_band": by_band(stats.num_running_by_band),
        "num_waiting": stats.num_waiting,
        "num_waiting_by_band": by_band(stats.num_waiting_by_band),
        "waiting_tokens": stats.waiting_tokens,
        "outstanding_tokens": view.outstanding_tokens,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "kv_usage": round(stats.kv_usage, 4),
        "generated_tokens_per_s": round(stats.generated_tokens_per_s, 1),
        "is_draining": stats.is_draining,
    }


def autoscaling_of(autoscaling: AutoscalingLoop) -> JsonObject:
    """Return the bounds on the number of replicas, and the last decision with its inputs."""
    settings, decision = autoscaling.settings, autoscaling.decision
    bounds: JsonObject = {
        "min_replicas": autoscaling.bounds.min_replicas,
        "max_replicas": autoscaling.bounds.max_replicas,
        "target_drain_s": settings.target_drain_s,
        "downscale_delay_s": settings.downscale_delay_s.to_fewer_s,
    }
    if decision is None:
        return bounds
    inputs = decision.inputs
    return bounds | {
        "desired_replicas": decision.desired_replicas,
        "needed_replicas": decision.needed_replicas,
        "num_replicas": inputs.num_replicas,
        "drain_s": None if decision.drain_s is None else round(decision.drain_s, 3),
        "num_requests": inputs.num_requests,
        "num_running": inputs.num_running,
        "waiting": [{"tokens": work.tokens, "due_s": work.due_s} for work in inputs.work],
        "replica_tokens_per_s": round(decision.replica_tokens_per_s, 1),
        "served_tokens_per_s": round(inputs.served_tokens_per_s, 1),
    }


def by_band(counts: tuple[int, ...]) -> dict[str, int]:
    """Return numbers by the name of their band."""
    return {band.name.lower(): count for band, count in zip(Band, counts, strict=True)}
