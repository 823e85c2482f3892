"""Threads that share the kernels' work: nobody waits for one that lost its processor, and nothing is done twice."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from replicas.model.kernel_build import compile_with_torch, found_compiler
from tests.model.compiled import need_kernels

LIMIT_S = 120


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """phases_check.cpp, compiled."""
    need_kernels()
    output = tmp_path_factory.mktemp("phases") / "check"
    libraries = Path(torch.__file__).parent / "lib"
    flags = ("-std=c++20", "-O1", "-fopenmp", f"-Wl,-rpath,{libraries}")
    compile_with_torch(found_compiler(), Path(__file__).with_name("phases_check.cpp"), output, flags)
    return output


@pytest.mark.parametrize("check", ["held", "random"])
def test_holds(program: Path, check: str) -> None:
    # One thread that is held can only be overtaken by another.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    subprocess.run([str(program), check], check=True, timeout=LIMIT_S, env=environment)
