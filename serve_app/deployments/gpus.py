"""How many GPUs there are for model replicas, asked while the application is built."""

from __future__ import annotations

import os
from pathlib import Path

import click
import ray

_CURRENT_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` leaves the address that a driver without any connects to."""


def num_cluster_gpus() -> float:
    """GPUs that the cluster has now.

    `serve deploy` builds inside the cluster. `serve run` builds before it connects, so we connect
    where it will and leave again; where there is no cluster yet it will start one of this machine.
    """
    if ray.is_initialized():
        return _gpus(ray.cluster_resources())
    command = click.get_current_context(silent=True)
    address = command.params.get("address") if command is not None else None
    if address is None and not (os.environ.get("RAY_ADDRESS") or _CURRENT_CLUSTER_FILE.exists()):
        return _num_gpus_of_this_machine()
    ray.init(address=address or "auto", log_to_driver=False)
    try:
        return _gpus(ray.cluster_resources())
    finally:
        ray.shutdown()


def _gpus(resources: dict[str, float]) -> float:
    return resources.get("GPU", 0.0)


def _num_gpus_of_this_machine() -> float:
    import torch  # only for this rare case: it takes seconds

    return float(torch.cuda.device_count())
