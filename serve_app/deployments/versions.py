"""Versions of deployments: a deployment's replicas are replaced only if its own arguments or the code have changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import ray
from pydantic_core import to_json
from ray import serve

from serve_app.process_settings import IngressProcess, JobsProcess, ModelProcess

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("serve_app", "router", "replicas")


def own_version(settings: ModelProcess | IngressProcess | JobsProcess) -> str:
    """Return a version that changes with the settings of a process, the code and the runtime environment."""
    digest = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        for source in sorted((_ROOT / package).rglob("*.py")):
            digest.update(source.read_bytes())
    if ray.is_initialized():
        digest.update(repr(sorted(ray.get_runtime_context().runtime_env.items(), key=str)).encode())
    digest.update(to_json(settings))
    return digest.hexdigest()


def keep_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Have Serve compare this version of the deployment with the running one; return the deployment.

    `serve deploy` of Serve 2.60 gives all deployments of an application one version: a digest of all its arguments. So
    a change of any argument would replace every process. There is no public setting for it. Serve assigns its version
    to the deployment's configuration, which here keeps its own.
    """
    config: Any = deployment._deployment_config

    class OwnVersion(type(config)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, version if name == "version" else value)

    config.__class__ = OwnVersion
    return deployment
