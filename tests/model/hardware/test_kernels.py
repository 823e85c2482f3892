"""The kernels are compiled once, a machine without a compiler is served as well, and threads share their work.

No thread waits for a preempted one, and no part is computed twice (phases_check.cpp).
"""

import logging
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.select import choose_attention
from replicas.model.hardware.kernel_build import KernelBuildError, built_library
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR, ModelOptions
from testkit.model.compiled_kernels import built_program, need_kernels
from testkit.model.engine_runs import build_engine, check_equals_generate, load_compiled, random_prompts
from testkit.model.tiny_checkpoints import write_checkpoint

PHASES_LIMIT_S = 120


def counting_compiler(directory: Path) -> str:
    """Return a slow compiler that counts its runs and copies the library that was compiled before."""
    directory.mkdir()
    compiler = directory / "compiler"
    library = built_library(DEFAULT_KERNEL_CACHE_DIR)
    compiler.write_text(
        f'#!/bin/sh\necho ran >> {directory}/runs\nsleep 1\nfor last; do :; done\ncp {library} "${{last#-o}}"\n'
    )
    compiler.chmod(0o700)
    return str(compiler)


def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    need_kernels()
    compiler = counting_compiler(tmp_path / "bin")
    with ThreadPoolExecutor(3) as pool:  # The lock is among open files, so that threads stand for processes.
        builds = [pool.submit(built_library, str(tmp_path / "kernels"), (compiler,)) for _ in range(3)]
    assert [len(build.result().read_bytes()) for build in builds] == [
        built_library(DEFAULT_KERNEL_CACHE_DIR).stat().st_size
    ] * 3
    assert (tmp_path / "bin" / "runs").read_text().split() == ["ran"]


def test_nothing_is_left_of_a_failed_compilation(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="failed"):
        built_library(str(tmp_path / "kernels"), ("false",))
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["lock"]


def test_missing_compiler_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        built_library(str(tmp_path / "kernels"), ("no-such-compiler",))
    (tmp_path / "file").touch()
    with pytest.raises(KernelBuildError, match="file"):
        built_library(str(tmp_path / "file" / "kernels"), ("true",))


def test_replica_serves_without_kernels_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_checkpoint(tmp_path, with_tokenizer=False)
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        loaded = load_model(
            ModelOptions(str(path), dtype="float32", kernel_cache_dir=str(tmp_path / "file" / "kernels"))
        )
    assert "without compiled CPU kernels" in caplog.text
    assert not loaded.has_kernels and choose_attention(loaded.attention_spec(16), "auto") is GatherAttention
    check_equals_generate(build_engine(loaded), path, random_prompts((5, 40)), max_tokens=8)


def test_replica_with_kernels_uses_them(tmp_path: Path) -> None:
    need_kernels()
    assert load_compiled(write_checkpoint(tmp_path, with_tokenizer=False)).has_kernels


@pytest.fixture(scope="module")
def program() -> Path:
    """phases_check.cpp, compiled."""
    flags = ("-std=c++20", "-O1", "-fopenmp", f"-Wl,-rpath,{Path(torch.__file__).parent / 'lib'}")
    return built_program(Path(__file__).with_name("phases_check.cpp"), flags)


@pytest.mark.parametrize("check", ["held", "random"])
def test_threads_share_phases(program: Path, check: str) -> None:
    # One thread that is held can only be overtaken by another.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    subprocess.run([str(program), check], check=True, timeout=PHASES_LIMIT_S, env=environment)
