"""`make serve` as a program: it starts, says where it is, and leaves nothing behind."""

import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.cli.private_cluster import free_port
from tests.limits import LIMIT_S, START_LIMIT_S
from tests.serve.conftest import MODEL_NAME
from tests.serve.instance import serving, start, stop


def test_an_instance_beside_another_serves_and_stops_without_a_trace(app, checkpoint, tmp_path):
    with serving(tmp_path, f"MODEL={checkpoint}", "ARGS=kv_cache_bytes=64MiB") as instance:
        reply = httpx.post(
            f"{instance.url}/v1/completions",
            json={"model": MODEL_NAME, "prompt": "x", "max_tokens": 3},
            timeout=LIMIT_S,
        )
        assert reply.json()["usage"]["completion_tokens"] == 3
        assert instance.dashboard_url != app.dashboard_url
        started = instance.descendants()
        [raylet] = [process for process in started if process.name() == "raylet"]
        [folder] = set(re.findall(r"/tmp/hw-\w+", " ".join(raylet.cmdline())))
        assert Path(folder).is_dir()
        # To `make` alone, which passes on SIGTERM but not SIGINT.
        stop(instance.process, signal.SIGINT)
        left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert left == []
        assert not Path(folder).exists()
    assert app.get("/health/ready") == {"status": "ready"}


def output_of(home: Path, *variables: str) -> str:
    process = start(home, *variables)
    assert process.wait(START_LIMIT_S) != 0
    return (home / "serve.log").read_text()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (["ARGS=max_num_sequences=4"], "max_num_sequences: Extra inputs are not permitted"),
        (["ARGS=max_num_seqs=lots"], "max_num_seqs: Input should be a valid integer"),
        (["ARGS=max_num_seqs"], "'max_num_seqs' is not of the form key=value"),
        (
            ["ARGS=max_num_seqs=64 max_num_batched_tokens=32"],
            "max_num_batched_tokens (32) must exceed max_num_seqs (64)",
        ),
        (["MODEL=/no/such/model"], "there is no directory /no/such/model"),
    ],
)
def test_a_mistake_is_told_at_once(tmp_path, variables, message):
    assert message in output_of(tmp_path, f"PORT={free_port('127.0.0.1')}", *variables)


def test_a_directory_without_a_model_is_told_at_once(tmp_path):
    assert f"{tmp_path} has no config.json" in output_of(tmp_path, f"MODEL={tmp_path}")


def test_a_taken_port_is_told_at_once(checkpoint, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in output_of(tmp_path, f"MODEL={checkpoint}", f"PORT={port}")


def test_a_model_that_cannot_be_loaded_ends_the_program(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((checkpoint / name).read_bytes())
    process = start(tmp_path, f"PORT={free_port('127.0.0.1')}", f"MODEL={broken}")
    try:
        assert process.wait(START_LIMIT_S) != 0
    except subprocess.TimeoutExpired:
        stop(process)
        raise
    assert "the application did not start" in (tmp_path / "serve.log").read_text(errors="replace")
