"""`headway models` and the two caches behind it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replicas.errors import ModelLoadError
from serve_app.cli.main import app
from serve_app.cli.server.served_model import prepare_model
from serve_app.models.cache import cached_models
from serve_app.models.default_model import DEFAULT_MODEL_NAME
from serve_app.models.local_models import local_directory
from serve_app.preflight.fields import read_fields


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the user's cache of models with two of them, and what else lies there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = tmp_path / ".cache/headway/models"
    for name in (DEFAULT_MODEL_NAME, "tiny-0123", ".tiny-being-converted"):
        (directory / name).mkdir(parents=True)
        (directory / name / "model.safetensors").write_bytes(bytes(1500))
    (directory / "tiny-0123.lock").touch()
    return directory


def models(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["models", *arguments], input=stdin)


def test_the_list_names_size_and_kind(cache: Path) -> None:
    rows = [line.split()[:4] for line in models("list").stdout.splitlines()[1:]]
    assert [row for row in rows if row[1] != "hub"] == [
        [DEFAULT_MODEL_NAME, "default", "1.5", "kB"],
        ["tiny-0123", "converted", "1.5", "kB"],
    ]


def test_models_are_removed_after_a_question(cache: Path) -> None:
    assert models("rm", "tiny-0123", stdin="n\n").exit_code == 1
    assert models("rm", "tiny-0123", "unknown", "--yes").exit_code == 1
    assert (cache / "tiny-0123").is_dir()
    result = models("rm", "tiny-0123", stdin="y\n")
    assert (result.exit_code, "Removed tiny-0123 (1.5 kB)" in result.stdout) == (0, True)
    assert not (cache / "tiny-0123").exists() and (cache / DEFAULT_MODEL_NAME).is_dir()


def test_pull_prints_the_directory_of_a_model_that_is_there(cache: Path) -> None:
    assert models("pull").stdout == f"{cache / DEFAULT_MODEL_NAME}\n"
    missing = models("pull", "nowhere.gguf")
    assert (missing.exit_code, missing.stderr) == (1, "error: there is no file nowhere.gguf\n")


def test_a_listed_name_is_a_model_everywhere(cache: Path) -> None:
    for name in (DEFAULT_MODEL_NAME, "tiny-0123"):
        assert models("pull", name).stdout == f"{cache / name}\n"
        assert local_directory(name) == cache / name
        with pytest.raises(ModelLoadError, match=f"{name} has no config.json"):
            prepare_model(read_fields({"model": name}))


def test_an_unknown_name_gets_the_nearest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"'tiny-012' is no model here, .*; did you mean tiny-0123"):
        prepare_model(read_fields({"model": "tiny-012"}))
    assert "did you mean tiny-0123" in models("rm", "tiny-01", "--yes").stderr
    assert "`headway models list` shows those here" in models("rm", "@@", "--yes").stderr


def test_downloads_of_the_hub_are_found_and_removed(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--acme--tiny"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (repository / folder).mkdir(parents=True)
    (repository / "blobs/1").write_bytes(bytes(2000))
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc/model.safetensors").symlink_to("../../blobs/1")
    [found] = cached_models(tmp_path / "none", tmp_path / "hub")
    assert (found.name, found.kind, found.num_bytes) == ("acme/tiny", "hub", 2000)
    found.remove()
    assert cached_models(tmp_path / "none", tmp_path / "hub") == []
    assert cached_models(tmp_path / "none", tmp_path / "no hub") == []
