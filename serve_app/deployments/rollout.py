"""Checks of a rollout before Serve changes anything: of the configuration, and of the room beside what runs now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import click
import ray
from ray.serve.exceptions import RayServeException

from serve_app.config import HeadwayConfig
from serve_app.deployments.autoscaling import most_gpus_of_a_node
from serve_app.deployments.nodes import Resources, findings_of_nodes, holds, living_nodes, replica_resources
from serve_app.deployments.serve_hooks import (
    Deployed,
    applications,
    deployed,
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


def refuse_spanning(config: HeadwayConfig) -> None:
    """Check that a node has the GPUs of all ranks of a replica, unless nodes may be added.

    Raises:
        RolloutRefused: none has.
    """
    num_ranks = config.replica_options().model.tensor_parallel_size
    if num_ranks == 1 or not config.num_gpus_per_replica or (ray.is_initialized() and has_node_autoscaler()):
        return
    most = most_gpus_of_a_node()
    if most < num_ranks:
        raise RolloutRefused(
            f"tensor_parallel_size: needs {num_ranks} GPUs of one node, and no node has more than {most:g}; a replica "
            "does not span nodes: lower it, and set num_replicas to use several nodes"
        )


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
    running = _running_model(args)
    is_replaced = running is not None and (
        running.version != own_version(config.model_process()) or running.resources != replica_resources(config)
    )
    # The memory of the running replicas counts as free, unless the new ones start beside them.
    is_beside = is_replaced and config.update == "surge"
    findings = findings_of_nodes(config, () if running is None or is_beside else running.processes)
    if is_replaced and running is not None and not has_node_autoscaler():
        whole = [node["Resources"] for node in living_nodes().values()]
        findings.append(Finding("update", room_fault(config, running, free_resources().values(), whole)))
    return findings


def _running_model(args: Mapping[str, Any]) -> Deployed | None:
    """Return the model deployment of the application that is built from `args`, if it has running replicas."""
    running = {name: model for name, model in deployed("Model").items() if model.processes}
    if len(running) > 1:  # A builder does not learn the name of its application.
        running = {name: model for name, model in running.items() if _args_of(applications()[name]) == args}
    return next(iter(running.values()), None)


def room_fault(
    config: HeadwayConfig, running: Deployed, free: Collection[Resources], whole: Collection[Resources]
) -> str | None:
    """Return why new model replicas would wait for ever, on nodes with the resources `whole` of which `free` are free.

    None: they find room.
    """
    asked = replica_resources(config)
    needed = " and ".join(f"{number:g} {name}" for name, number in asked.items() if number)
    if config.update == "replace":
        if any(holds(node, asked) for node in whole):
            return None
        return f"no node has {needed}, which a model replica reserves (cpus_per_replica, num_gpus_per_replica)"
    num_replicas = len(running.processes)
    # At the start of the last new replica, one old replica still runs.
    if any(holds(node, asked) for node in free) and all(
        sum(node.get(name, 0.0) for node in free) + (num_replicas - 1) * running.resources[name]
        >= num_replicas * number
        for name, number in asked.items()
    ):
        return None
    return f"surge starts replicas beside the running ones, each with {needed}; there is no room; set replace"


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
