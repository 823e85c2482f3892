"""Number of GPUs for model replicas, read while the application is built."""

from __future__ import annotations

import os
from pathlib import Path

import click
import ray

_CURRENT_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""File with the address of the cluster that `ray start` started; a driver without an address connects to it."""


def num_cluster_gpus() -> float:
    """Return the number of GPUs in the cluster now.

    `serve deploy` builds inside the cluster. `serve run` builds before it connects. In that case the function connects
    to the cluster that `serve run` will use, and disconnects again. If there is no cluster yet, `serve run` will start
    one on this machine, whose GPUs are counted instead.
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
    import torch  # here, since the import takes seconds and is rarely needed

    return float(torch.cuda.device_count())
