"""`make serve` as a program: it starts, says where it is, and leaves nothing behind."""

import re
import signal
import subprocess
from pathlib import Path

import httpx
import psutil

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


def test_a_mistake_ends_make_with_its_reason(tmp_path):
    process = start(tmp_path, f"PORT={free_port('127.0.0.1')}", "ARGS=max_num_seqs=64 max_num_batched_tokens=32")
    assert process.wait(START_LIMIT_S) != 0
    assert "max_num_batched_tokens (32) must exceed max_num_seqs (64)" in (tmp_path / "serve.log").read_text()


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
