"""Checks of a rollout before Serve changes anything: of the configuration, and of the room beside what runs now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from ray.serve.exceptions import RayServeException

from serve_app.config import HeadwayConfig
from serve_app.deployments.nodes import findings_of_nodes, holds, living_nodes, replica_resources
from serve_app.deployments.serve_hooks import (
    applications,
    deployed_model,
    free_resources,
    has_node_autoscaler,
    own_version,
)
from serve_app.preflight.machine import Finding, Placement, machine_findings


class RolloutRefused(RayServeException, click.ClickException):
    """Refusal of a configuration; the message is one line.

    Serve shows the message of a `RayServeException` without a traceback, and does not build again. `serve run` prints
    that of a `ClickException` in the same way.
    """


@dataclass(frozen=True, slots=True)
class RunningModel:
    """Model deployment of an application that runs now."""

    version: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    """What Ray reserves for each replica."""
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Processes of its replicas, by the node's id."""

    @classmethod
    def updated_by(cls, args: Mapping[str, Any]) -> RunningModel:
        """Return the model deployment of the application that is built from `args`; an empty one if there is none."""
        running = {name: details for name, details in applications().items() if "Model" in details["deployments"]}
        if len(running) > 1:  # A builder does not learn the name of its application.
            running = {name: details for name, details in running.items() if _args_of(details) == args}
        for name, details in running.items():
            version, options = deployed_model(name)
            pids: dict[str, tuple[int, ...]] = defaultdict(tuple)
            for replica in details["deployments"]["Model"]["replicas"]:
                if replica.get("pid") is not None:
                    pids[replica["node_id"]] += (replica["pid"],)
            return cls(version, {"CPU": options.get("num_cpus", 0.0), "GPU": options.get("num_gpus", 0.0)}, pids)
        return cls()

    def is_replaced_by(self, config: HeadwayConfig) -> bool:
        """Return True if the configuration needs other replicas than those that run now."""
        return self.version != own_version(config.model_process()) or self.resources != replica_resources(config)


def check_rollout(config: HeadwayConfig, args: Mapping[str, Any], has_cluster: bool) -> None:
    """Check a configuration, read from `args`, where the application will run.

    Raises:
        RolloutRefused: naming every fault, with its field.
    """
    if has_cluster:
        _refuse_to_remove_others()
    faults = [f"{one.field}: {one.fault}" for one in rollout_findings(config, args, has_cluster) if one.fault]
    if faults:
        raise RolloutRefused("; ".join(faults))


def rollout_findings(config: HeadwayConfig, args: Mapping[str, Any], has_cluster: bool) -> list[Finding]:
    """Return what the checks find on the nodes of the cluster; without one, on this machine."""
    if not has_cluster:
        return list(machine_findings(config, Placement(config.num_replicas)))
    running = RunningModel.updated_by(args)
    is_replaced = running.is_replaced_by(config)
    # What runs already, or ends before the new replicas start, leaves its memory to them.
    stays = is_replaced and config.update == "surge"
    findings = findings_of_nodes(config, {} if stays else running.pids)
    return [*findings, *_room(config)] if is_replaced and running.pids else findings


def _room(config: HeadwayConfig) -> Iterator[Finding]:
    """Check that a new model replica finds room, beside the running ones if they serve meanwhile.

    Otherwise it would wait for ever. Ray's autoscaler would add a node for it.
    """
    if has_node_autoscaler():
        return
    is_surge = config.update == "surge"
    nodes = free_resources() if is_surge else {node_id: node["Resources"] for node_id, node in living_nodes().items()}
    asked = replica_resources(config)
    fault = None
    if not any(holds(resources, asked) for resources in nodes.values()):
        needed = " and ".join(f"{number:g} {name}" for name, number in asked.items() if number)
        fault = (
            f"surge starts new replicas beside the running ones, and no node has {needed} free for one; set replace"
            if is_surge
            else f"no node has {needed}, which a model replica reserves (cpus_per_replica, num_gpus_per_replica)"
        )
    yield Finding("update", fault)


def _refuse_to_remove_others() -> None:
    """Refuse `serve run` where it would take away an application that runs already.

    If another application has its route prefix, it fails and ends Serve; and when it ends, it ends Serve, too. Either
    removes every application of the cluster.

    Raises:
        RolloutRefused: naming that application.
    """
    command = click.get_current_context(silent=True)
    if command is None or command.info_name != "run":
        return
    for name, details in applications().items():
        is_other = name != command.params["name"]
        ends_with_it = command.params["blocking"] or details["route_prefix"] == command.params["route_prefix"]
        if details["source"] == "declarative" or (is_other and ends_with_it):
            raise RolloutRefused(
                f"`serve run` would remove the application {name}, which runs on this cluster: change its config file "
                "and `serve deploy` that, or start another cluster"
            )


def _args_of(details: Mapping[str, Any]) -> object:
    return (details.get("deployed_app_config") or {}).get("args", {})
