"""`make serve` as a program that cannot start: it says why, and ends."""

import subprocess

from serve_app.cli.private_cluster import free_port
from tests.limits import START_LIMIT_S
from tests.serve.instance import start, stop


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
