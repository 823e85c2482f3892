"""Batches and jobs through `make serve` survive the SIGKILL of its processes."""

import contextlib
import io
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from testkit.limits import LIMIT_S
from testkit.serving.served import Served, serving, stop, wait_for
from tests.ray.conftest import MODEL_NAME
from tests.ray.serve.launch.test_private_cluster import check_edge, check_ports

pytestmark = pytest.mark.rotated

NUM_LINES = 240
OUTPUT_TOKENS = 200
"""Of each line: the batch must outlast three deaths."""
ENDPOINT = "/v1/completions"


def variables(checkpoint: Path) -> tuple[str, ...]:
    arguments = "max_num_seqs=4 kv_cache_bytes=64MiB load_poll_period_s=0.2 cpus_per_replica=0.5 job_lease_s=3"
    return (f"MODEL={checkpoint}", "REPLICAS=2", "DTYPE=float32", f"ARGS={arguments}")


def client_of(app: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": f"line {number}", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}


def submit(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", io.BytesIO(data)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert batch.status == "validating"
    return batch.id


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def looked_up(client: openai.OpenAI, batch_id: str) -> Any:
    """Return the batch; None while no process answers."""
    with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
        return client.batches.retrieve(batch_id)
    return None


def num_completed(client: openai.OpenAI, batch_id: str) -> int:
    batch = looked_up(client, batch_id)
    return 0 if batch is None or batch.request_counts is None else batch.request_counts.completed


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of everything that outlives a `make serve`."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def batch_id(checkpoint: Path, home: Path) -> str:
    """Return the id of a batch that is not done although its processes were killed, at last all of them."""
    with serving(home, *variables(checkpoint)) as app, client_of(app) as client:
        batch_id = submit(client, [line(number) for number in range(NUM_LINES)])
        for deployment in ("Jobs", "Model", "Ingress"):
            before = num_completed(client, batch_id)
            wait_for(lambda: num_completed(client, batch_id) > before, "lines are done")  # noqa: B023
            command = f"ray::ServeReplica:headway:{deployment}"
            wait_for(lambda: app.find(command), f"a replica of {deployment} runs").kill()  # noqa: B023
        wait_for(lambda: num_completed(client, batch_id) > 0, "the batch is known")
        job = httpx.post(f"{app.url}/generate", json={"prompt": "x", "max_tokens": 5}, timeout=LIMIT_S)
        assert job.status_code == 202
        (home / "job").write_text(job.json()["job_id"])
        assert num_completed(client, batch_id) < NUM_LINES
        app.kill()
    return batch_id


@pytest.fixture(scope="module")
def restarted(checkpoint: Path, home: Path, batch_id: str) -> Iterator[Served]:
    """Another `make serve` on what the first one has left, with the other profile."""
    with serving(home, *variables(checkpoint), "PROFILE=throughput") as instance:
        yield instance


def test_a_restart_resumes_and_answers_every_line_once(restarted, home, batch_id):
    with client_of(restarted) as client:
        batch = wait_for(
            lambda: (found := looked_up(client, batch_id)) and found.status == "completed" and found, "done"
        )
        answers = results(client, batch.output_file_id) + results(client, batch.error_file_id)
        assert Counter(answer["custom_id"] for answer in answers) == Counter(
            f"line-{number}" for number in range(NUM_LINES)
        )
        assert batch.request_counts.completed == NUM_LINES and batch.error_file_id is None
        assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {OUTPUT_TOKENS}
        job = httpx.get(f"{restarted.url}/v1/jobs/{(home / 'job').read_text()}?wait=30", timeout=LIMIT_S).json()
        assert job["status"] == "completed" and job["result"]["usage"]["completion_tokens"] == 5


def test_the_throughput_profile_opens_no_port_to_others(restarted):
    assert "haproxy" in check_ports(restarted)
    check_edge(restarted.url)
    folder = Path(restarted.ray_environment["RAY_AUTH_TOKEN_PATH"]).parent
    configuration = next(folder.rglob("haproxy.cfg")).read_text()
    frontend = configuration.partition("frontend http_frontend")[2]
    assert "timeout http-request 10s" in configuration
    assert frontend.index("reject if { sc0_conn_cur gt 2048 }") < frontend.index("sc0_conn_cur gt 1024")
    assert "text/plain lf-string" not in configuration


def test_an_instance_beside_another_stops_without_a_trace(app, restarted):
    assert restarted.dashboard_url != app.dashboard_url
    started = restarted.descendants()
    [raylet] = [process for process in started if process.name() == "raylet"]
    [folder] = set(re.findall(r"/tmp/hw-\w+", " ".join(raylet.cmdline())))
    assert Path(folder).is_dir()
    # To `make` alone, which passes on SIGTERM but not SIGINT.
    stop(restarted.process, signal.SIGINT)
    left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    assert not Path(folder).exists()
    assert app.get("/health/ready") == {"status": "ready"}


def test_a_bad_file_fails_and_a_cancelled_batch_keeps_output(app, client):
    bad = submit(client, [line(0), line(0), {**line(1), "method": "GET"}])
    failed = wait_for(lambda: (found := client.batches.retrieve(bad)).status == "failed" and found, "it failed")
    assert [(error.code, error.line) for error in failed.errors.data] == [
        ("duplicate_custom_id", 2), ("invalid_value", 3),
    ]  # fmt: skip

    long = submit(client, [line(number, max_tokens=400) for number in range(60)])
    wait_for(lambda: num_completed(client, long) > 0, "lines are done")
    client.batches.cancel(long)
    cancelled = wait_for(lambda: (found := client.batches.retrieve(long)).status == "cancelled" and found, "cancelled")
    done, undone = results(client, cancelled.output_file_id), results(client, cancelled.error_file_id)
    assert 0 < len(done) == cancelled.request_counts.completed
    assert len(done) + len(undone) == 60
    assert {one["error"]["code"] for one in undone} == {"batch_cancelled"}
