"""Threads that share the kernels' work: nobody waits for one that lost its processor, and nothing is done twice."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from testkit.model.compiled_kernels import built_program

LIMIT_S = 120


@pytest.fixture(scope="module")
def program() -> Path:
    """phases_check.cpp, compiled."""
    libraries = Path(torch.__file__).parent / "lib"
    flags = ("-std=c++20", "-O1", "-fopenmp", f"-Wl,-rpath,{libraries}")
    return built_program(Path(__file__).with_name("phases_check.cpp"), flags)


@pytest.mark.parametrize("check", ["held", "random"])
def test_holds(program: Path, check: str) -> None:
    # One thread that is held can only be overtaken by another.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    subprocess.run([str(program), check], check=True, timeout=LIMIT_S, env=environment)
