"""Checks of one machine name the field, the path and the reason; fields are refused in the words of `headway serve`."""

import os
from pathlib import Path
from typing import Any

import click
import pytest
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.config import DEMO_MODEL_NAME
from serve_app.deployments.rollout import RolloutRefused, check_rollout
from serve_app.preflight.fields import ConfigError, read_fields
from serve_app.preflight.machine import Placement, machine_findings
from serve_app.settings.replaced import REPLACED
from testkit.model.broken_checkpoints import DAMAGES
from testkit.model.tiny_checkpoints import write_checkpoint


def faults(placement: Placement | None = None, **fields: Any) -> dict[str, str | None]:
    """Return what is found for each field on this machine, where by default only an ingress and jobs may run."""
    placement = placement or Placement(num_model_replicas=0)
    config = read_fields({"num_gpus_per_replica": 0, **fields})
    return {finding.field: finding.fault for finding in machine_findings(config, placement)}


def test_the_defaults_are_fine(tmp_path: Path) -> None:
    """With the bundled model: the default one would be fetched and converted, which test_default_model.py does."""
    assert faults(model=DEMO_MODEL_NAME, data_dir=str(tmp_path / "not" / "yet")) == {"model": None, "data_dir": None}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"not: [a mapping", b"\xff\xfe", b"- list", b"abc: {tenant: x}"])
def test_a_key_file_that_an_ingress_could_not_read_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(content)
    fault = faults(api_key_file=str(path))["api_key_file"]
    assert fault is not None and str(path) in fault and "\n" not in fault
    assert "api_key_file" not in faults(Placement(0, has_ingress=False), api_key_file=str(path))


def test_a_missing_key_file_is_named() -> None:
    assert faults(api_key_file="/no/keys")["api_key_file"] == "/no/keys cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("field", "value"),
    [("data_dir", "{}/file/data"), ("files_url", "{}/file"), ("database_url", "sqlite:///{}/file/jobs.sqlite3")],
)
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, field: str, value: str) -> None:
    (tmp_path / "file").touch()
    fields: dict[str, Any] = {"data_dir": str(tmp_path), field: value.format(tmp_path)}
    assert faults(**fields)[field] == f"{tmp_path}/file is a file, not a folder"
    assert field not in faults(Placement(0, has_jobs=False), **fields)


@pytest.mark.skipif(os.access("/proc/1", os.W_OK), reason="this user may write anywhere")
def test_a_folder_that_cannot_be_written_is_named() -> None:
    assert faults(data_dir="/proc/1/data")["data_dir"] == "/proc/1 cannot be written"


def test_an_ingress_needs_the_tokenizer_and_no_weights(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", with_tokenizer=False)
    (model / "model.safetensors").unlink()
    fault = faults(model=str(model))["model"]
    assert fault is not None and fault.startswith(f"cannot load the tokenizer of model '{model}'")


@pytest.mark.parametrize("damage", ["no such directory", "missing shard", "truncated weights", "too little memory"])
def test_a_replica_needs_whole_weights_that_fit(tmp_path: Path, damage: str) -> None:
    model = write_checkpoint(tmp_path / "model")
    DAMAGES[damage].apply(model)
    fault = faults(Placement(num_model_replicas=1), model=str(model))["model"]
    assert fault is not None and DAMAGES[damage].reason in fault and str(model) in fault


def test_memory_of_replicas_that_stop_first_counts_as_free(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model"))

    def free_gib(*stopped_pids: int) -> float:
        fault = faults(Placement(1, stopped_pids=stopped_pids), model=model, kv_cache_bytes="900TiB")["model"]
        return float(str(fault).partition(" GiB of memory are free")[0].rpartition(" ")[2])

    assert free_gib(*(os.getpid(),) * 10_000) > free_gib() + 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_sequences": 4}, "there is no field max_num_sequences; did you mean max_num_seqs?"),
        ({"max_num_seqs": "lots"}, "max_num_seqs: Input should be a valid integer"),
        ({"routing_policy": "x"}, f"routing_policy is no longer a setting. {REPLACED['routing_policy']}"),
        ({"max_num_seqs": 0, "update": "later"}, "; "),
    ],
)
def test_a_wrong_field_is_refused_in_one_line_by_the_builder(args: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutRefused) as refused:
        build(args)
    with pytest.raises(ConfigError) as told:
        read_fields(args)
    assert message in str(refused.value) == str(told.value)
    assert "\n" not in str(refused.value)


def test_a_refusal_names_every_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args = {"model": "/no/model", "api_key_file": "/no/keys", "data_dir": str(tmp_path / "file")}
    with pytest.raises(RolloutRefused) as refused:
        check_rollout(read_fields({**args, "num_gpus_per_replica": 0}), args, has_cluster=False)
    assert str(refused.value) == (
        "model: there is no directory /no/model; api_key_file: /no/keys cannot be read: No such file or directory; "
        f"data_dir: {tmp_path}/file is a file, not a folder"
    )


def test_serve_repeats_no_refusal_and_the_command_prints_no_traceback() -> None:
    assert issubclass(RolloutRefused, RayServeException) and issubclass(RolloutRefused, click.ClickException)
