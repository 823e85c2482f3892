"""Checks of a configuration on every node of the cluster that may run a part of the application."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.config import HeadwayConfig
from serve_app.models.default_model import DEFAULT_MODEL_NAME
from serve_app.preflight.machine import Finding, Placement, machine_findings

_log = logging.getLogger(f"ray.serve.{__name__}")
"""Logger below Serve's, whose handlers write the log of a build."""

_LIMIT_S = 120.0
"""Longest wait for the checks of all nodes, seconds."""
_CONVERSION_LIMIT_S = 1800.0
"""The same where nodes may have to convert a GGUF file."""
_MAX_NAMED_NODES = 3

Resources = Mapping[str, float]
"""Amounts of Ray's resources, by name."""


def replica_resources(config: HeadwayConfig) -> dict[str, float]:
    """Return what Ray reserves for a model replica."""
    return {"CPU": config.cpus_per_replica, "GPU": config.num_gpus_per_replica or 0.0}


def holds(resources: Resources, needed: Resources) -> bool:
    """Return True if a node with these resources has those that are needed."""
    return all(resources.get(name, 0.0) >= number for name, number in needed.items())


def living_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's records of the nodes that are there now, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def findings_of_nodes(config: HeadwayConfig, stopped: Collection[tuple[str, int]]) -> list[Finding]:
    """Return what the checks find, each fault once, with the nodes that have it unless all do.

    `stopped` are processes of replicas, node's id and process id, that end before new ones start. A node that does not
    answer in time, or cannot run the checks, counts as not checked; the log names it.
    """
    nodes = living_nodes()
    placements = dict(_placements(config, nodes, stopped))
    own_id = ray.get_runtime_context().get_node_id()
    tasks = {
        node_id: _findings.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            config, placement
        )
        for node_id, placement in placements.items()
        if node_id != own_id
    }
    findings = {own_id: list(machine_findings(config, placements[own_id]))} if own_id in placements else {}
    is_converted = config.model == DEFAULT_MODEL_NAME or config.model_path.endswith(".gguf")
    limit_s = _CONVERSION_LIMIT_S if is_converted else _LIMIT_S
    if tasks:
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=limit_s)
    for node_id, task in tasks.items():
        try:
            findings[node_id] = ray.get(task, timeout=0)
        except RayError as error:
            ray.cancel(task, force=True)
            _log.warning("%s is not checked: %s", _name(nodes[node_id]), str(error).strip().splitlines()[-1])
    return merged(findings, {node_id: _name(node) for node_id, node in nodes.items()})


@ray.remote(num_cpus=0, max_retries=0, max_calls=1)
def _findings(config: HeadwayConfig, placement: Placement) -> list[Finding]:
    return list(machine_findings(config, placement))


def _placements(
    config: HeadwayConfig, nodes: Mapping[str, Mapping[str, Any]], stopped: Collection[tuple[str, int]]
) -> Iterator[tuple[str, Placement]]:
    """Yield the nodes that may run a part of the application, each with the parts."""
    model_ids = [node_id for node_id, node in nodes.items() if holds(node["Resources"], replica_resources(config))]
    # Of several nodes each may get one replica; how many more is Serve's choice.
    num_replicas = config.num_replicas if len(model_ids) == 1 else 1
    for node_id, node in nodes.items():
        placement = Placement(
            num_model_replicas=num_replicas if node_id in model_ids else 0,
            has_ingress=holds(node["Resources"], {"CPU": config.cpus_per_ingress}),
            has_jobs=holds(node["Resources"], {"CPU": config.cpus_per_jobs}),
            stopped_pids=tuple(pid for stopped_id, pid in stopped if stopped_id == node_id),
        )
        if placement.num_model_replicas or placement.has_ingress or placement.has_jobs:
            yield node_id, placement


def merged(findings: Mapping[str, list[Finding]], names: Mapping[str, str]) -> list[Finding]:
    """Return each finding once, in the order of the fields. A fault has the names of its nodes, unless all have it."""
    nodes: dict[Finding, list[str]] = defaultdict(list)
    for node_id, found in findings.items():
        for finding in found:
            nodes[finding].append(names[node_id])
    faulty_fields = {finding.field for finding in nodes if finding.fault is not None}
    merged = []
    for finding, named in nodes.items():
        if finding.fault is None and finding.field in faulty_fields:
            continue
        more = f" and {len(named) - _MAX_NAMED_NODES} more" if len(named) > _MAX_NAMED_NODES else ""
        where = "" if len(named) == len(findings) else f" (on {', '.join(named[:_MAX_NAMED_NODES])}{more})"
        merged.append(replace(finding, fault=finding.fault and finding.fault + where))
    return merged


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeID'][:8]} at {node['NodeManagerAddress']}"
