"""`make serve` as a program: it ends with a reason if it cannot start, and finishes its requests if it is stopped."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from testkit.free_port import free_port
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.served import LOG, OUTPUT, ROOT, clean_environment, serving, start, stop

_FAILING_OWNER = """
from serve_app.cli.server.private_cluster import private_cluster

with private_cluster(num_cpus=1):
    raise LookupError("the reason")
"""
"""Program whose error leaves a private cluster."""


def errors_of(home: Path, *variables: str) -> str:
    """Return the errors of a `make serve` that ends by itself, with a status that is not 0."""
    process = start(home, f"PORT={free_port('127.0.0.1')}", *variables)
    try:
        assert process.wait(START_LIMIT_S) != 0
    except subprocess.TimeoutExpired:
        stop(process)
        raise
    return (home / LOG).read_text(errors="replace")


def test_a_mistake_ends_make_with_its_reason(tmp_path):
    errors = errors_of(tmp_path, "ARGS=max_num_seqs=64 max_num_batched_tokens=32")
    assert "max_num_batched_tokens (32) must exceed max_num_seqs (64)" in errors


def test_a_model_without_weights_ends_make_before_ray_starts(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((checkpoint / name).read_bytes())
    errors = errors_of(tmp_path, f"MODEL={broken}")
    assert "lacks its weights: there is no model.safetensors" in "".join(errors.splitlines()[-5:])
    assert "Starting" not in (tmp_path / OUTPUT).read_text()


@pytest.mark.deep
def test_a_failing_replica_ends_make_with_its_reason(checkpoint, tmp_path):
    errors = errors_of(tmp_path, f"MODEL={checkpoint}", "ARGS=kv_cache_bytes=1KiB")
    assert "the application did not start: kv_cache_bytes is 1024" in "".join(errors.splitlines()[-5:])


@pytest.mark.deep
def test_an_error_that_leaves_a_private_cluster_is_printed(tmp_path):
    command = [sys.executable, "-c", _FAILING_OWNER]
    ended = subprocess.run(
        command, cwd=ROOT, env=clean_environment(tmp_path), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("LookupError: the reason\n")


@pytest.mark.deep
def test_a_group_signal_lets_a_stream_finish_and_ends_all(checkpoint, tmp_path):
    lines: list[str] = []
    has_begun = threading.Event()

    def read_stream() -> None:
        body = {"model": checkpoint.name, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
            for line in response.iter_lines():
                lines.append(line)
                has_begun.set()

    with serving(tmp_path, f"MODEL={checkpoint}", "ARGS=kv_cache_bytes=64MiB --graceful-shutdown-timeout-s 200") as app:
        processes = app.descendants()
        reader = threading.Thread(target=read_stream)
        reader.start()
        assert has_begun.wait(LIMIT_S)
        os.killpg(app.process.pid, signal.SIGTERM)
        app.process.wait(LIMIT_S)
        reader.join(LIMIT_S)
        assert lines[-2:] == ["data: [DONE]", ""]
        _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
        assert alive == []
