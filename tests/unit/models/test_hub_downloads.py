"""`headway models pull` from a hub whose connections break."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.http.hub import COMMIT, HUB_ID, Hub, serving_hub
from testkit.limits import LIMIT_S
from testkit.serving.served import ROOT, clean_environment

pytestmark = pytest.mark.rotated

WEIGHTS = random.Random(0).randbytes(3_000_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"no", "consolidated.safetensors": b"no"}


def pull(hub: Hub, home: Path, hub_id: str = HUB_ID) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve_app.cli.main", "models", "pull", hub_id]
    environment = {**clean_environment(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def directory(home: Path) -> Path:
    return home / ".cache/huggingface/hub/models--acme--tiny/snapshots" / COMMIT


def test_a_model_is_fetched_once_and_its_hashes_are_checked(tmp_path: Path) -> None:
    hub = Hub(FILES)
    with serving_hub(hub):
        pulled = pull(hub, tmp_path)
        assert pulled.stdout == f"{directory(tmp_path)}\n", pulled.stderr
        assert "model.safetensors (3.0 MB): fetched, its hash agrees\n" in pulled.stderr
        assert sorted(path.name for path in directory(tmp_path).iterdir()) == ["config.json", "model.safetensors"]
        assert (directory(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
        num_sent = len(hub.sent)
        again = pull(hub, tmp_path)
        assert again.stdout == pulled.stdout and "model.safetensors (3.0 MB): here, its hash agrees\n" in again.stderr
        assert len(hub.sent) == num_sent == 2


def test_a_cut_connection_goes_on_within_a_command(tmp_path: Path) -> None:
    hub = Hub(FILES, cuts_after=2_000_000)
    with serving_hub(hub):
        assert pull(hub, tmp_path).returncode == 0
    assert (directory(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert [part[1:] for part in hub.sent if part[0] == "model.safetensors"] == [(0, 2_000_000), (2_000_000, 1_000_000)]


def test_the_next_command_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    hub = Hub(FILES)
    blobs = directory(tmp_path).parents[1] / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.hash_of('model.safetensors')}.incomplete").write_bytes(WEIGHTS[:1_234_567])
    with serving_hub(hub):
        assert pull(hub, tmp_path).returncode == 0
    assert (directory(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert ("model.safetensors", 1_234_567, len(WEIGHTS) - 1_234_567) in hub.sent
    assert not list(blobs.glob("*.incomplete"))


def test_a_dead_connection_is_an_error_and_what_came_is_kept(tmp_path: Path) -> None:
    hub = Hub(FILES, cuts_after=0)
    blobs = directory(tmp_path).parents[1] / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{hub.hash_of('model.safetensors')}.incomplete"
    partial.write_bytes(WEIGHTS[:1_000_000])
    with serving_hub(hub):
        failed = pull(hub, tmp_path)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(f"error: '{HUB_ID}' cannot be downloaded: ")
    assert failed.stderr.endswith("; what has come is kept for the next try\n")
    assert partial.read_bytes() == WEIGHTS[:1_000_000]


def test_another_hash_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    hub = Hub(FILES, damage=b"!")
    with serving_hub(hub):
        failed = pull(hub, tmp_path)
    assert failed.returncode == 1 and "has the hash" in failed.stderr.splitlines()[-1]
    assert not list((directory(tmp_path).parents[1] / "blobs").glob("*.incomplete"))
    assert not (directory(tmp_path) / "model.safetensors").exists()


def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    hub = Hub(FILES)
    with serving_hub(hub):
        assert pull(hub, tmp_path).returncode == 0
        (directory(tmp_path) / "model.safetensors").resolve().write_bytes(WEIGHTS[:-1] + b"!")
        assert "fetched" in pull(hub, tmp_path).stderr
    assert (directory(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_without_a_hub_a_model_that_is_here_is_found(tmp_path: Path) -> None:
    hub = Hub(FILES)
    with serving_hub(hub):
        assert pull(hub, tmp_path).returncode == 0
        unknown = pull(hub, tmp_path, "acme/none")
    assert "there is no model 'acme/none' here or on the hub" in unknown.stderr
    assert pull(hub, tmp_path).stdout == f"{directory(tmp_path)}\n"
    assert "the hub cannot be reached" in pull(hub, tmp_path, "acme/none").stderr
