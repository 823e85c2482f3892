"""The number of replicas follows the waiting work, down to none, and no request fails."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from serve_app.config import HeadwayConfig
from testkit.limits import LIMIT_S
from testkit.serving.served import Served, serving, wait_for
from tests.ray.conftest import MODEL_NAME

pytestmark = pytest.mark.rotated

NUM_SLOTS = 2
MAX_REPLICAS = 2


@pytest.fixture(scope="module")
def autoscaled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One replica to start with, none at least; streams get 2 s when their replica is given back."""
    arguments = (
        f"max_num_seqs={NUM_SLOTS} kv_cache_bytes=64MiB cpus_per_replica=0.5 "
        f"min_replicas=0 max_replicas={MAX_REPLICAS} target_drain_s=0.5 downscale_delay_s=3/3 "
        "graceful_shutdown_timeout_s=2"
    )
    with serving(
        tmp_path_factory.mktemp("home"), f"MODEL={checkpoint}", "DTYPE=float32", f"ARGS={arguments}"
    ) as instance:
        yield instance


class Load:
    """Clients that ask again as soon as they have an answer, until they are stopped."""

    def __init__(self, url: str, num_clients: int, max_tokens: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.replicas: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._url = url
        self._max_tokens = max_tokens
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients: list[Future[None]] = [self._pool.submit(self._run) for _ in range(num_clients)]

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=LIMIT_S) as http:
            while not self._is_over.is_set():
                reply = http.post("/v1/completions", json=body(self._max_tokens))
                self.statuses[reply.status_code] += 1
                self.replicas[reply.headers.get("x-model-replica", "none")] += 1

    def stop(self) -> None:
        self._is_over.set()
        for client in self._clients:
            client.result(LIMIT_S)
        self._pool.shutdown()


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": "the quick brown fox",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


def read_stream(url: str, max_tokens: int) -> list[str]:
    with httpx.stream("POST", f"{url}/v1/completions", json=body(max_tokens, stream=True), timeout=LIMIT_S) as response:
        return [line for line in response.iter_lines() if line]


def test_the_number_of_replicas_is_fixed_unless_bounds_are_given():
    config = HeadwayConfig(num_replicas=2)
    assert (config.effective_min_replicas, config.effective_max_replicas, config.is_autoscaled) == (2, 2, False)
    assert HeadwayConfig(min_replicas=0).is_autoscaled
    assert HeadwayConfig(max_replicas=2).is_autoscaled
    with pytest.raises(ValidationError, match=r"num_replicas \(1\).* min_replicas \(2\).* max_replicas \(3\)"):
        HeadwayConfig(min_replicas=2, max_replicas=3)


def wait_for_replicas(app: Served, number: int) -> None:
    wait_for(lambda: len(app.replicas()) == number, f"{number} replicas are known")


def desired(app: Served) -> int:
    number: int = app.get("/load")["autoscaling"]["desired_replicas"]
    return number


def test_replicas_follow_the_work_and_no_request_fails(autoscaled):
    app = autoscaled
    wait_for_replicas(app, 1)
    load = Load(app.url, num_clients=6 * NUM_SLOTS, max_tokens=150)
    wait_for(lambda: desired(app) == MAX_REPLICAS, "more replicas are wanted")
    wait_for(lambda: len(load.replicas) == MAX_REPLICAS, "a new replica has answered")
    shown = app.get("/load")["autoscaling"]
    assert (shown["min_replicas"], shown["max_replicas"], shown["num_replicas"]) == (0, MAX_REPLICAS, MAX_REPLICAS)
    assert shown["served_tokens_per_s"] > 0 and shown["replica_tokens_per_s"] > 0
    assert f"headway:autoscale_desired_replicas {float(MAX_REPLICAS)}" in httpx.get(f"{app.url}/metrics").text

    with ThreadPoolExecutor(1) as pool:
        load.stop()
        assert set(load.statuses) == {200}
        stream = pool.submit(read_stream, app.url, 2500)
        wait_for_replicas(app, 1)
        lines = stream.result(LIMIT_S)
    assert lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)


def test_scale_to_zero_then_the_next_request_waits(autoscaled):
    app = autoscaled
    wait_for_replicas(app, 0)
    wait_for(
        lambda: desired(app) == 0 and app.get("/load")["autoscaling"]["num_replicas"] == 0, "none is wanted, none known"
    )
    assert httpx.get(f"{app.url}/health/ready").status_code == 200
    assert app.replicas() == [], "to ask whether it is ready wakes nobody"
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda _: httpx.post(f"{app.url}/v1/completions", json=body(5), timeout=LIMIT_S), range(8))
        )
    assert [reply.status_code for reply in replies] == [200] * 8


def test_a_job_that_waits_in_the_database_wakes_a_deployment_too(autoscaled):
    app = autoscaled
    wait_for_replicas(app, 0)
    job = httpx.post(f"{app.url}/v1/jobs", json=body(5), timeout=LIMIT_S)
    assert job.status_code == 202
    done = httpx.get(f"{app.url}/v1/jobs/{job.json()['id']}?wait=60", timeout=LIMIT_S).json()
    assert (done["status"], done["result"]["usage"]["completion_tokens"]) == ("completed", 5)
