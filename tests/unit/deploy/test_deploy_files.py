"""The files that operators deploy with are what Ray and Headway take, and ask for Ray's token."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config import HeadwayConfig
from serve_app.http.edge import MIDDLEWARE_PATH
from serve_app.models.default_model import DEFAULT_MODEL_NAME
from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
DEPLOY = ROOT / "deploy"
RAY_SERVICE = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "headway.service").read_text()


MODELS = {"local": DEFAULT_MODEL_NAME, "gpu": "Qwen/Qwen3-4B-Instruct-2507", "kuberay": "Qwen/Qwen3-4B-Instruct-2507"}


def test_the_model_that_is_served_unless_told_has_a_name() -> None:
    assert HeadwayConfig().model == DEFAULT_MODEL_NAME == HeadwayConfig().model_name


def serve_config(name: str) -> str:
    if name == "kuberay":
        return str(RAY_SERVICE["spec"]["serveConfigV2"])
    return (ROOT / "serve_app" / "configs" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", ["local", "gpu", "kuberay"])
def test_serve_configs_are_valid(name: str) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(serve_config(name)))
    [application] = schema.applications
    config = HeadwayConfig.model_validate(application.args)
    assert application.import_path == "headway:build"
    # The default model where there is no GPU; a model for one GPU of 24 GB elsewhere.
    assert application.args["model"] == config.model == MODELS[name]


EDGE = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARE_PATH,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""Environment of every node of a cluster: its proxies have the edge of `headway serve` and are replaced as soon."""


@pytest.mark.parametrize("name", ["gpu", "kuberay"])
def test_production_has_two_ingresses_with_a_cpu_each(name: str) -> None:
    [application] = yaml.safe_load(serve_config(name))["applications"]
    config = HeadwayConfig.model_validate(application["args"])
    assert config.num_ingress_replicas >= 2 and config.cpus_per_ingress >= 1


def test_every_node_has_the_edge() -> None:
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            assert {entry["name"]: entry["value"] for entry in container["env"]} == EDGE
    for command in (*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]):
        if "ray start" in command:
            assert EDGE.items() <= dict(word.split("=", 1) for word in command.split() if "=" in word).items()
    by_hand = (ROOT / "docs" / "cluster.md").read_text().partition("export ")[2].partition("```")[0]
    assert dict(word.split("=", 1) for word in by_hand.split() if "=" in word) == EDGE | {"RAY_AUTH_MODE": "token"}
    function = import_module(MIDDLEWARE_PATH.partition(":")[0])
    assert callable(getattr(function, MIDDLEWARE_PATH.partition(":")[2]))


def test_kubernetes_draws_a_token() -> None:
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == version("ray")


def test_the_cluster_launcher_gives_every_node_the_token() -> None:
    assert CLUSTER["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]]
    assert sum("ray start" in command for command in starts) == 2
    for command in starts:
        if "ray start" in command or "serve deploy" in command:
            assert "RAY_AUTH_MODE=token" in command


# Fields of KubeRay's RayService by their path, from ray-operator/apis/ray/v1/rayservice_types.go and
# raycluster_types.go of KubeRay 1.5; those of a pod from Kubernetes' core/v1 API. `*` stands for any name.
KUBERAY_FIELDS: Mapping[str, str] = {
    "": "apiVersion kind metadata spec",
    "metadata": "name namespace labels annotations",
    "spec": "serveConfigV2 rayClusterConfig serviceUnhealthySecondThreshold deploymentUnhealthySecondThreshold "
    "serveService upgradeStrategy excludeHeadPodFromServeSvc rayClusterDeletionDelaySeconds",
    "spec.rayClusterConfig": "rayVersion authOptions enableInTreeAutoscaling autoscalerOptions headServiceAnnotations "
    "suspend managedBy gcsFaultToleranceOptions headGroupSpec workerGroupSpecs",
    "spec.rayClusterConfig.authOptions": "mode",
    "headGroupSpec": "serviceType headService enableIngress rayStartParams template",
    "workerGroupSpecs": "groupName replicas minReplicas maxReplicas idleTimeoutSeconds numOfHosts rayStartParams "
    "template scaleStrategy suspend",
    "template": "metadata spec",
    "template.spec": "containers initContainers volumes nodeSelector tolerations affinity imagePullSecrets "
    "serviceAccountName securityContext terminationGracePeriodSeconds",
    "containers": "name image imagePullPolicy command args env envFrom ports resources volumeMounts livenessProbe "
    "readinessProbe startupProbe lifecycle securityContext",
    "env": "name value valueFrom",
    "ports": "name containerPort protocol",
    "resources": "requests limits",
    "readinessProbe": "httpGet exec tcpSocket initialDelaySeconds periodSeconds timeoutSeconds failureThreshold "
    "successThreshold",
    "httpGet": "path port host scheme httpHeaders",
}
FREE = ("rayStartParams", "requests", "limits")


def unknown_fields(value: Any, path: str = "") -> Iterator[str]:
    """Yield the fields that the lists of `KUBERAY_FIELDS` lack. The list of the longest end of a path counts."""
    if isinstance(value, list):
        for entry in value:
            yield from unknown_fields(entry, path)
    elif isinstance(value, dict) and path.rpartition(".")[2] not in FREE:
        ends = [".".join(path.split(".")[number:]) for number in range(path.count(".") + 1)]
        known = next((KUBERAY_FIELDS[end] for end in ends if end in KUBERAY_FIELDS), "").split()
        yield from (f"{path}.{name}" for name in value if name not in known)
        for name, inner in value.items():
            yield from unknown_fields(inner, f"{path}.{name}".lstrip("."))


def test_kubernetes_knows_every_field() -> None:
    assert list(unknown_fields(RAY_SERVICE)) == []
    assert list(unknown_fields({"spec": {"rayClusterConfig": {"headGroup": {}}}})) == [
        "spec.rayClusterConfig.headGroup"
    ]


def test_a_pod_runs_the_image_that_was_built_and_is_ready_once_it_can_answer() -> None:
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    [worker] = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], worker):
        for container in group["template"]["spec"]["containers"]:
            assert (container["image"], container["imagePullPolicy"]) == ("headway", "IfNotPresent")
    [container] = worker["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": 8000}


def test_the_compose_file_has_the_form_of_its_schema() -> None:
    package = find_spec("check_jsonschema")
    if package is None or package.origin is None:
        pytest.skip("check-jsonschema is not installed")
    schema = Path(package.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    assert list(validator.iter_errors({**COMPOSE, "service": {}})) != []


def test_the_compose_file_serves_the_default_model_and_its_dashboards() -> None:
    services = COMPOSE["services"]
    assert services["headway"]["command"][:3] == ["headway", "serve", DEFAULT_MODEL_NAME]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))
    named = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert named == set(COMPOSE["volumes"])
    used = {config["source"] for service in services.values() for config in service.get("configs", ())}
    assert used == set(COMPOSE["configs"])
    files = {name: yaml.safe_load(config["content"]) for name, config in COMPOSE["configs"].items()}
    [job] = files["prometheus"]["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["headway:8000"]}]
    [source] = files["datasources"]["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    [provider] = files["providers"]["providers"]
    assert f"dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    arguments = services["headway"]["build"]["args"]
    assert set(arguments) == set(re.findall(r"^ARG (\w+)=", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_takes_the_compose_files_configuration(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(COMPOSE["configs"]["prometheus"]["content"])
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert checked.returncode == 0, checked.stderr


# Directives of systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.kill(5) that a service may use.
UNIT_FIELDS = {
    "Unit": {"Description", "Documentation", "After", "Wants", "Requires", "StartLimitIntervalSec", "StartLimitBurst"},
    "Service": {"User", "Group", "WorkingDirectory", "Environment", "EnvironmentFile", "ExecStart", "Restart",
                "RestartSec", "TimeoutStopSec", "TimeoutStartSec", "KillMode", "LimitNOFILE", "Type"},
    "Install": {"WantedBy"},
}  # fmt: skip


def test_systemd_knows_every_directive_of_the_unit(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "headway.service")
    assert {section: set(unit[section]) - UNIT_FIELDS[section] for section in unit.sections()} == {
        "Unit": set(), "Service": set(), "Install": set()
    }  # fmt: skip
    _, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert command == "serve"
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and "/etc/headway/keys.yaml" in result.stderr  # every option is known
    if shutil.which("systemd-analyze") is not None:
        (tmp_path / "headway.service").write_text(re.sub(r"/opt/headway/.venv/bin/headway", "/bin/true", UNIT))
        verify = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "headway.service")]
        checked = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        faults = [line for line in checked.stderr.splitlines() if "headway.service" in line and "Unknown" in line]
        assert faults == []
