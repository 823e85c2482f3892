"""`headway doctor`: its checks, and the exit code that they lead to."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replicas.model.hardware.processor import value_bytes_on_cpu
from serve_app.cli.checks.machine_checks import Check, Status, folder_check, machine_checks, port_check
from serve_app.cli.checks.model_checks import device_check, memory_checks, ranks_check
from serve_app.cli.main import app
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig

DEMO = Path(HeadwayConfig(model=DEMO_MODEL_NAME).model_path)
ON_CPU: dict[str, Any] = {
    "is_gpu": False,
    "num_gpus": 0,
    "gpu_memory_bytes": 0,
    "dtype": "bfloat16",
    "value_bytes": 2,
    "keeps_bits": False,
    "read_bytes_per_s": 20e9,
    "part": None,
    "model": {
        "kv_bytes_per_token": 2**20,
        "kv_bytes_per_token_in_8_bits": 2**19,
        "state_slot_bytes": 0,
        "max_model_len": 100,
        "kv_bytes_of_longest": 100 * 2**20,
        "has_experts": False,
        "num_values": 10**7,
    },
}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_is_described() -> None:
    found = by_name(list(machine_checks(8000)))
    assert "cores" in found["processor"].finding and "torch" in found["versions"].finding
    assert all(check.advice for check in found.values() if check.status is not Status.OK)


def test_a_taken_port_and_a_full_disk_are_warned_of(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_check(port).status is Status.WARN
    assert port_check(port).status is Status.OK
    assert folder_check("x", tmp_path / "not" / "yet", 1).status is Status.OK
    assert folder_check("x", tmp_path, 10**18).status is Status.WARN


@pytest.mark.parametrize(
    ("changes", "cache", "whole"),
    [
        ({}, Status.OK, Status.OK),
        (
            {"model": {**ON_CPU["model"], "max_model_len": 1000, "kv_bytes_of_longest": 1000 * 2**20}},
            Status.WARN,
            Status.OK,
        ),
        ({"is_gpu": True, "gpu_memory_bytes": 10**9}, Status.OK, Status.OK),
        ({"is_gpu": True, "gpu_memory_bytes": 10**6}, Status.WARN, Status.FAIL),
    ],
)
def test_a_models_memory_is_compared_with_the_machines(changes: dict[str, Any], cache: Status, whole: Status) -> None:
    found = by_name(list(memory_checks(DEMO, ON_CPU | changes)))
    assert (found["KV cache"].status, found["model's memory"].status) == (cache, whole)


def test_the_speed_of_one_request_is_bounded_by_the_memory() -> None:
    checks = by_name(list(memory_checks(DEMO, ON_CPU)))
    # The files have two bytes for a weight; a processor without bfloat16 computes in float32.
    weight_bytes = sum(file.stat().st_size for file in DEMO.glob("*.safetensors")) * value_bytes_on_cpu("auto") // 2
    assert "memory is read at 20.0 GB/s" in checks["speed"].finding
    bound = float(checks["speed"].finding.split()[2].replace(",", ""))
    assert bound == pytest.approx(20e9 / weight_bytes, rel=0.3)
    with_experts = {"model": ON_CPU["model"] | {"has_experts": True}}
    assert "speed" not in by_name(list(memory_checks(DEMO, ON_CPU | with_experts)))


@pytest.mark.parametrize("device", [{}, {"is_gpu": True, "gpu_memory_bytes": 10**9}])
def test_a_model_that_computes_whole_texts_has_no_kv_cache(device: dict[str, Any]) -> None:
    encoder = {"model": ON_CPU["model"] | {"kv_bytes_per_token": 0, "kv_bytes_of_longest": 0}}
    checks = by_name(list(memory_checks(DEMO, ON_CPU | device | encoder)))
    assert checks["KV cache"].finding.startswith("none") and "speed" not in checks
    assert checks["model's memory"].status is Status.OK


def test_a_gpu_that_torch_does_not_find_is_warned_of() -> None:
    on_cpu, on_gpu = ON_CPU | {"device": "cpu"}, ON_CPU | {"device": "H200", "is_gpu": True}
    assert device_check(on_cpu, has_driver=True).status is Status.WARN
    assert device_check(on_cpu, has_driver=False).status is Status.OK
    assert device_check(on_gpu, has_driver=True).status is Status.OK


def test_each_rank_needs_a_gpu_of_this_node() -> None:
    on_gpu = ON_CPU | {"is_gpu": True, "num_gpus": 1, "gpu_memory_bytes": 80 * 10**9}
    check = ranks_check(on_gpu, 2)
    assert (check.status, check.finding) == (Status.FAIL, "needs 2 GPUs of 80.0 GB, this node has 1")
    assert ranks_check(on_gpu | {"num_gpus": 2}, 2).status is Status.OK
    part = {"num_values": 10**7, "num_bytes": 2 * 10**7, "num_bytes_in_fp8": 10**7, "description": "bfloat16"}
    weights = by_name(list(memory_checks(DEMO, on_gpu | {"part": part}, 2)))["weights"].finding
    assert weights.startswith("20.0 MB") and weights.endswith("fp8 10.0 MB, cut for 2 GPUs)")


def test_weights_that_are_not_whole_fail(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes()[:-1])
    [check] = memory_checks(tmp_path, ON_CPU)
    assert check.status is Status.FAIL and "truncated" in check.finding


@pytest.mark.deep
def test_the_whole_command_reports_kernels_and_failures() -> None:
    """It imports torch in a process of its own."""
    good = CliRunner().invoke(app, ["doctor", "--model", "headway-demo", "--json"])
    names = {check["name"]: check for check in json.loads(good.stdout)}
    assert names["layers in C++"]["status"] == names["attention in C++"]["status"] == "ok"
    assert "requests of" in names["KV cache"]["found"]
    bad = CliRunner().invoke(app, ["doctor", "--model", "/no/such", "--url", "http://127.0.0.1:1"])
    assert bad.exit_code == 1 and "/no/such" in bad.stdout and "cannot reach http://127.0.0.1:1" in bad.stdout
