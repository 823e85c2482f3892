"""Updates by `serve deploy` under load: only what reads a changed setting is replaced, and no request fails."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from testkit.limits import START_LIMIT_S
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.serving.served import wait_for
from tests.ray.conftest import MODEL_NAME
from tests.ray.own.conftest import Cluster, Load, local_config

pytestmark = pytest.mark.deep


def replicas_of(cluster: Cluster) -> dict[str, set[str]]:
    """Return the running replicas' ids by deployment."""
    return {
        name: {each["replica_id"] for each in deployment["replicas"] if each["state"] == "RUNNING"}
        for name, deployment in cluster.application()["deployments"].items()
    }


def update(cluster: Cluster, config: Path) -> Load:
    """Deploy a configuration under load; return the load, which has ended."""
    with Load(cluster.served.url, 4) as load:
        load.wait_until_running()
        cluster.run(f"serve deploy {config}")
        with suppress(TimeoutError):  # Nothing has to be done for some changes.
            wait_for(lambda: cluster.application().get("status") != "RUNNING", "it begins", 10.0, 0.1)
        cluster.wait_until_running()
        time.sleep(3)
    return load


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_update_replaces_only_what_reads_the_setting(
    cluster, checkpoint, tmp_path, num_replicas
):  # fmt: skip
    fields: dict[str, Any] = {
        "model": str(checkpoint), "dtype": "float32", "kv_cache_bytes": "64MiB", "num_replicas": num_replicas,
    }  # fmt: skip
    fields |= {"data_dir": str(tmp_path / "data"), "num_gpus_per_replica": 0, "cpus_per_replica": 0}
    cluster.run(f"serve deploy {local_config(tmp_path, **fields)}")
    cluster.wait_until_running()
    wait_for(lambda: len(replicas_of(cluster).get("Model", ())) == num_replicas, "all replicas run", START_LIMIT_S)
    for change, replaced in (
        ({"max_num_seqs": 8}, {"Model"}),
        ({"keep_alive_s": 5}, {"Ingress"}),
        ({"num_ingress_replicas": 2}, set()),
        ({"num_replicas": num_replicas + 1, "max_replicas": num_replicas + 1}, set()),
    ):
        before = replicas_of(cluster)
        fields |= change
        started_s = time.monotonic()
        load = update(cluster, local_config(tmp_path, **fields))
        after = replicas_of(cluster)
        kept = {name for name in before if before[name] <= after[name]}
        print(f"{change}: {time.monotonic() - started_s:.1f} s, {load.num_whole} streams, {len(load.failures)} failed, "
              f"longest {load.longest_s:.1f} s, kept {sorted(kept)}")  # fmt: skip
        assert not load.failures, load.failures[:3]
        assert kept == set(before) - replaced


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_new_weights_arrive_under_load_and_fail_no_request(
    cluster, checkpoint, tmp_path, num_replicas
):  # fmt: skip
    """Every stream is of the old weights or of the new ones; none mixes them."""
    changed = tmp_path / "changed"
    changed.mkdir()
    write_checkpoint(changed, max_position_embeddings=32768, num_hidden_layers=5)
    fields: dict[str, Any] = {
        "model": str(checkpoint), "served_model_name": MODEL_NAME, "dtype": "float32", "kv_cache_bytes": "64MiB",
        "num_replicas": num_replicas, "data_dir": str(tmp_path / "data"), "num_gpus_per_replica": 0,
        "cpus_per_replica": 0,
    }  # fmt: skip
    cluster.run(f"serve deploy {local_config(tmp_path, **fields)}")
    cluster.wait_until_running()
    wait_for(lambda: len(replicas_of(cluster).get("Model", ())) == num_replicas, "all replicas run", START_LIMIT_S)
    started_s = time.monotonic()
    load = update(cluster, local_config(tmp_path, **{**fields, "model": str(changed)}))
    print(
        f"new weights: {time.monotonic() - started_s:.1f} s, {load.num_whole} streams, longest {load.longest_s:.1f} s"
    )
    assert not load.failures, load.failures[:3]
    old, new = load.texts[0], load.texts[-1]
    assert old != new and set(load.texts) == {old, new}
