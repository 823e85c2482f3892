"""Processes that import torch on behalf of one that must not."""

from __future__ import annotations

import os
import subprocess
import sys

from replicas.errors import ModelLoadError


def run_module(module: str, *arguments: str, limit_s: float, has_gpu: bool = False) -> str:
    """Run a module as a program, without a GPU unless `has_gpu`, and return the last line that it printed.

    Raises:
        ModelLoadError: the program failed, with the last line of its errors, or took more than `limit_s`.
    """
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error"} | ({} if has_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, "-m", module, *arguments]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ModelLoadError(f"`python -m {module}` took more than {limit_s:.0f} s") from None
    if run.returncode != 0:
        raise ModelLoadError((run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1])
    return (run.stdout.splitlines() or [""])[-1]
