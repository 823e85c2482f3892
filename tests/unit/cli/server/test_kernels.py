"""`headway serve` has the kernels compiled before Ray starts, beside the preparation of the model."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.server.kernels import kernels_compiled
from serve_app.config import HeadwayConfig
from testkit.serving.served import wait_for


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that counts its runs, and writes the library once the file `go` is there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "g++"
    program.write_text(
        f"#!/bin/sh\necho ran >> {folder}/runs\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\n"
        'for last; do :; done\ntouch "${last#-o}"\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    yield folder
    (folder / "go").touch()
    for thread in threading.enumerate():
        if thread.name == "compilation":
            thread.join()


def config_of(directory: Path | None, **fields: object) -> HeadwayConfig:
    """Return a configuration for replicas without a GPU."""
    kernel_cache_dir = None if directory is None else str(directory)
    return HeadwayConfig.model_validate({"device": "cpu", "kernel_cache_dir": kernel_cache_dir, **fields})


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


@pytest.mark.parametrize("fields", [{"dtype": "float16"}, {"num_gpus_per_replica": 1, "device": "auto"}])
def test_nothing_is_compiled_that_no_replica_needs(tmp_path: Path, compiler: Path, fields: dict[str, object]) -> None:
    (compiler / "go").touch()
    for directory in (None, tmp_path / "kernels"):
        with kernels_compiled(config_of(directory, **(fields if directory else {}))):
            pass
    assert not (compiler / "runs").exists()
