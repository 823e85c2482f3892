"""Threads that share the kernels' work: nobody waits for one that lost its processor, and nothing is done twice."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import replicas.model

TORCH = Path(torch.__file__).parent
SOURCES = Path(replicas.model.__file__).parent / "cpu_kernels"
LIMIT_S = 120


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """phases_check.cpp, compiled."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    output = tmp_path_factory.mktemp("phases") / "check"
    subprocess.run(
        [
            compiler, "-std=c++20", "-O1", "-fopenmp", f"-I{SOURCES}", f"-I{TORCH / 'include'}",
            str(Path(__file__).with_name("phases_check.cpp")), f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}",
            "-ltorch_cpu", "-lc10", f"-o{output}",
        ],
        check=True,
    )  # fmt: skip
    return output


@pytest.mark.parametrize("check", ["held", "random"])
def test_holds(program: Path, check: str) -> None:
    # One thread that is held can only be overtaken by another.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    subprocess.run([str(program), check], check=True, timeout=LIMIT_S, env=environment)
