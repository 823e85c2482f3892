"""Processes that import torch on behalf of one that must not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from replicas.child_processes import Stalled, run_child
from replicas.errors import ModelLoadError


def run_module(
    step: str,
    module: str,
    *arguments: str,
    cpu_limit_s: float | None = None,
    has_gpu: bool = False,
    watch: Callable[[str], None] | None = None,
) -> str:
    """Run a module as a program, without a GPU unless `has_gpu`, and return the last line that it printed.

    `watch` gets the end of its errors so far, several times a second.

    Raises:
        ModelLoadError: the program failed, with the last line of its errors; or `step` stalled, or took more processor
            time than `cpu_limit_s`.
    """
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error"} | ({} if has_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    try:
        run = run_child(step, [sys.executable, "-m", module, *arguments], cpu_limit_s, environment, watch=watch)
    except Stalled as error:
        raise ModelLoadError(str(error)) from None
    if run.returncode != 0:
        raise ModelLoadError((run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1])
    return (run.stdout.splitlines() or [""])[-1]
