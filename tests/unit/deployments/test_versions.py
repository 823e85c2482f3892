"""Versions of deployments: a change of one setting replaces only the processes that read it."""

import os
import subprocess
import sys
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from replicas.engine.config import KVPressurePolicy
from router.scaling.autoscaling import DownscaleDelay
from router.types import LatencyTargets
from serve_app.app import build_with
from serve_app.config import HeadwayConfig
from serve_app.deployments.serve_hooks import own_version
from serve_app.settings.by_band import BandQueues, BandTargets, BandWaits, QueueLimit


def versions(**fields: Any) -> dict[str, str]:
    """Return the versions that Serve compares, after it has assigned its own."""
    config = HeadwayConfig.model_validate({"device": "cpu", **fields})
    found = {}
    for deployment in build_app(build_with(config), name="headway").deployments:
        deployment._deployment_config.version = "of Serve"
        found[deployment.name] = str(deployment._deployment_config.version)
    return found


@pytest.mark.parametrize(
    ("field", "value", "replaced"),
    [
        ("max_num_seqs", 8, {"Model"}),
        ("keep_alive_s", 3, {"Ingress"}),
        ("database_url", "sqlite:////tmp/other", {"Jobs"}),
        ("max_queue_wait_s", 60, {"Ingress", "Jobs"}),
        ("served_model_name", "another", {"Ingress", "Jobs"}),
        ("dtype", "float32", {"Model"}),
        ("num_replicas", 2, set()),
        ("max_replicas", 2, set()),
        ("num_ingress_replicas", 3, set()),
        ("graceful_shutdown_timeout_s", 5, set()),
        ("cpus_per_replica", 1, set()),
        ("update", "surge", set()),
    ],
)
def test_a_setting_replaces_the_deployments_that_read_it(field: str, value: Any, replaced: set[str]) -> None:
    before, after = versions(), versions(**{field: value})
    assert {name for name in before if before[name] != after[name]} == replaced


def test_another_number_of_jobs_workers_replaces_none() -> None:
    url = "postgresql+psycopg://localhost/headway"
    assert versions(database_url=url) == versions(database_url=url, num_jobs_workers=3)


def test_the_version_is_the_same_in_every_process() -> None:
    program = (
        "from serve_app.config import HeadwayConfig as C; from serve_app.deployments.serve_hooks import own_version;"
        "print([own_version(each) for each in (C().model_process(), C().ingress_process(), C().jobs_process())])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert printed.stdout.decode().strip() == str([own_version(each) for each in _processes(HeadwayConfig())])


OPTIONS_OF_DEPLOYMENTS = {
    "num_replicas", "min_replicas", "max_replicas", "num_ingress_replicas", "min_ingress_replicas",
    "max_ingress_replicas", "num_jobs_workers", "cpus_per_ingress", "cpus_per_jobs", "graceful_shutdown_timeout_s",
    "health_check_timeout_s", "update", "stream_drain_s",
}  # fmt: skip
"""Settings that Serve reads, and no process."""
SHARES = ("max_tenant_queue_share", "trace_sampling_ratio", "gpu_memory_utilization")
OTHERS: dict[str, Any] = {
    "api_key_file": "keys", "num_gpus_per_replica": 0.5, "kv_pressure_policy": KVPressurePolicy.PAUSE_NEW,
    "generation_config": "vllm", "prefix_cache_scope": "shared", "webhook_allowed_hosts": "10.0.0.1",
    "downscale_delay_s": DownscaleDelay(1.0), "max_queue": BandQueues(standard=QueueLimit(1, 1)),
    "max_wait_s": BandWaits(batch=1.0), "slo": BandTargets(batch=LatencyTargets(1.0)), "tool_call_parser": "hermes",
    "allowed_origins": "null", "otlp_traces_endpoint": "http://another", "max_model_len": 99, "kv_cache_bytes": 2**20,
}  # fmt: skip


def _another(name: str, default: Any) -> Any:
    """Return a value other than a setting's default."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default / 2 if name in SHARES else default + 1
    return 3 if name.startswith(("max_", "min_", "num_", "target_")) else "another"


def _processes(config: HeadwayConfig) -> list[Any]:
    return [config.model_process(), config.ingress_process(), config.jobs_process()]


def test_every_setting_is_read_by_a_process_or_by_serve() -> None:
    # An API key file lets the share of a tenant count. An unknown number of GPUs is one without GPUs.
    config = HeadwayConfig.model_construct(api_key_file="other keys", num_gpus_per_replica=1.0)
    unread = {
        name
        for name, field in HeadwayConfig.model_fields.items()
        if _processes(config) == _processes(config.model_copy(update={name: _another(name, field.default)}))
    }
    assert unread == OPTIONS_OF_DEPLOYMENTS


def test_a_process_loads_its_own_copy_of_the_model() -> None:
    for settings in _processes(HeadwayConfig(model="model.gguf")):
        assert settings.model_path == "model.gguf"
        moved = settings.with_model("/converted")
        assert (moved.model_path, moved.with_model("model.gguf")) == ("/converted", settings)
