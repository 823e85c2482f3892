"""Streams that last longer than a stop of a replica, while replicas and ingresses come and go, in both profiles."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import TIMED, serving
from testkit.limits import START_LIMIT_S
from testkit.serving.served import Served, wait_for
from testkit.serving.streams import clients
from tests.ray.conftest import MODEL_NAME

pytestmark = [pytest.mark.deep, pytest.mark.parametrize("is_throughput_profile", [False, True])]

FIELDS: dict[str, Any] = {
    "served_model_name": MODEL_NAME, "step_times": "slow-gpu", "cpus_per_replica": 0.1, "num_replicas": 2,
    "num_ingress_replicas": 2, "graceful_shutdown_timeout_s": 2,
}  # fmt: skip
NUM_STREAMS, NUM_TOKENS = 8, 1800
"""At 41 ms a step each stream lasts for more than a minute."""


def body(number: int) -> dict[str, Any]:
    fields = {"model": MODEL_NAME, "prompt": f"stream {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {**fields, "stream": True}


def scale(served: Served, fields: dict[str, Any]) -> None:
    """Deploy the same application with other numbers of processes, and wait for them."""
    application = {"name": "headway", "route_prefix": "/", "import_path": TIMED, "args": fields}
    headers = {"authorization": f"Bearer {Path(served.places['token_path']).read_text()}"}
    url = f"{served.dashboard_url}/api/serve/applications/"
    httpx.put(url, json={"applications": [application]}, headers=headers, timeout=60).raise_for_status()
    time.sleep(1)
    wait_for(lambda: served.applications()["headway"]["status"] == "RUNNING", "it is scaled", START_LIMIT_S, 0.2)


def test_streams_survive_ten_changes_of_scale(is_throughput_profile: bool, tmp_path: Path) -> None:
    fields = {**FIELDS, "data_dir": str(tmp_path), "stream_drain_s": 300}
    with serving(TIMED, fields, is_throughput_profile) as served, clients(served.url) as many:
        streams = [many.open(body(number)) for number in range(NUM_STREAMS)]
        wait_for(lambda: all(stream.texts for stream in streams), "every stream has begun", START_LIMIT_S)
        for change in range(10):
            name = "num_ingress_replicas" if change % 2 else "num_replicas"
            scale(served, {**fields, name: 2 - change // 2 % 2})
        wait_for(lambda: all(stream.is_over for stream in streams), "every stream has ended", START_LIMIT_S)
        assert not [stream.error for stream in streams if stream.error is not None]
        again = [many.open(body(number)) for number in range(NUM_STREAMS)]
        wait_for(lambda: all(stream.is_over for stream in again), "every stream has ended again", START_LIMIT_S)
        assert [stream.texts for stream in streams] == [stream.texts for stream in again]


def test_a_stream_that_outlasts_the_removal_of_its_ingress_ends_with_an_error(
    is_throughput_profile: bool, tmp_path: Path
) -> None:
    fields = {**FIELDS, "data_dir": str(tmp_path), "stream_drain_s": 3}
    with serving(TIMED, fields, is_throughput_profile) as served, clients(served.url) as many:
        streams = [many.open(body(number)) for number in range(NUM_STREAMS)]
        wait_for(lambda: all(stream.texts for stream in streams), "every stream has begun", START_LIMIT_S)
        scale(served, {**fields, "num_ingress_replicas": 1})
        wait_for(lambda: any(stream.is_over for stream in streams), "the ingress has ended its streams", START_LIMIT_S)
        time.sleep(3)
        ended = [stream for stream in streams if stream.is_over]
        assert 0 < len(ended) < NUM_STREAMS
        assert all("draining" in (stream.error or "") for stream in ended), [stream.error for stream in ended]
