"""`headway check` prints one line for each item of a config file; its exit code says whether it would be refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app

CONFIGS = Path(__file__).resolve().parents[3] / "serve_app" / "configs"


def checked(path: Path, *options: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["check", str(path), *options])
    return result.exit_code, result.output.splitlines()


def with_args(path: Path, name: str = "local.yaml", **args: Any) -> Path:
    config = yaml.safe_load((CONFIGS / name).read_text())
    config["applications"][0]["args"] |= args
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("name", ["local.yaml", "gpu.yaml"])
def test_the_own_files_would_be_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    lines = ["headway: fields: ok", "headway: model: ok", "headway: data_dir: ok"]
    assert checked(CONFIGS / name, "--only-fields") == (0, lines[:1])
    path = with_args(tmp_path / name, name, model="headway-demo")  # its own model is not on this machine
    assert checked(path) == (0, lines)


def test_each_item_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = with_args(tmp_path / "config.yaml", model="/no/model", data_dir=str(tmp_path))
    assert checked(path) == (
        1,
        ["headway: fields: ok", "headway: model: there is no directory /no/model", "headway: data_dir: ok"],
    )


def test_a_wrong_field_has_the_words_of_the_server(tmp_path: Path) -> None:
    path = with_args(tmp_path / "config.yaml", max_num_sequences=4)
    line = "headway: fields: there is no field max_num_sequences; did you mean max_num_seqs?"
    assert checked(path) == (1, [line])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seqs: 4", "is not a config file of Ray Serve: applications: Field required"),
        ("a: [", "cannot be read"),
        ("applications: [{name: x, route_prefix: /, import_path: other:build}]", "has no application with"),
        ("applications: [{name: x, import_path: headway:build, args: 3}]", "applications.0.args: "),
    ],
)
def test_another_file_is_wrong_usage(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    code, [line] = checked(path)
    assert code == 2 and line.startswith(f"error: {path}") and message in line
