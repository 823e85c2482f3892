"""Versions of deployments: a change of one setting replaces only the processes that read it."""

import os
import subprocess
import sys
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from serve_app.app import build
from serve_app.config import HeadwayConfig
from serve_app.deployments.versions import own_version


def versions(**fields: Any) -> dict[str, str]:
    """Return the versions that Serve compares, after it has assigned its own."""
    config = HeadwayConfig.model_validate({"device": "cpu", **fields})
    found = {}
    for deployment in build_app(build(config), name="headway").deployments:
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
        "from serve_app.config import HeadwayConfig as C; from serve_app.deployments.versions import own_version;"
        "print(own_version(C().of_ingress()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert printed.stdout.decode().strip() == own_version(HeadwayConfig().of_ingress())


SHARES = ("max_tenant_queue_share", "trace_sampling_ratio")


def _composed(config: HeadwayConfig) -> dict[str, list[Any]]:
    """Return what each deployment composes of its configuration."""
    http = config.ingress_settings()
    routing = [
        config.flow_limits(), config.watch_settings(), config.latency_targets(), config.model_path, config.model_names,
        config.engine_limits().enable_prefix_caching, config.webhook_allowed_hosts, config.jobs_settings(),
        config.jobs_files_url, http.limits, http.tool_call_parser, http.num_tokenizer_threads,
        config.tracing_settings(),
    ]  # fmt: skip
    return {
        "Model": [config.replica_options(), config.load_poll_period_s, config.num_gpus_per_replica],
        "Ingress": [*routing, http],
        "Jobs": [*routing, config.jobs_database_url, config.webhook_secret, config.data_dir],
    }


def test_a_deployment_has_all_settings_that_it_composes() -> None:
    values: dict[str, Any] = {}
    for name, field in HeadwayConfig.model_fields.items():
        if isinstance(field.default, bool):
            values[name] = not field.default
        elif isinstance(field.default, int | float):
            values[name] = field.default / 2 if name in SHARES else field.default + 1
        elif name.endswith(("_dir", "_url")):
            values[name] = "/tmp/another"
    values |= {"model": "another", "served_model_name": "one,two", "api_key_file": "keys", "num_gpus_per_replica": 0.5}
    values["otlp_traces_endpoint"] = "http://another"
    values |= {"compile_layers": None, "gpu_memory_utilization": 0.5}
    config = HeadwayConfig.model_construct(**values)
    whole = _composed(config)
    for name, own in (("Model", config.of_model()), ("Ingress", config.of_ingress()), ("Jobs", config.of_jobs())):
        assert _composed(own)[name] == whole[name], name
