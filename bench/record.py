"""Figures of a measurement: percentiles, ratios, and result files with commit, machine and library versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def percentiles(values: Iterable[float], percents: Sequence[float]) -> list[float]:
    """Return linearly interpolated percentiles of at least one value."""
    ordered = sorted(values)
    return [_at(ordered, (len(ordered) - 1) * percent / 100) for percent in percents]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return one percentile of at least one value."""
    return percentiles(values, (percent,))[0]


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base if both are known and the base is not 0."""
    return None if value is None or not base else value / base


def cell(value: float | None, form: str) -> str:
    """Return a value for a table; a dash if there is none."""
    return "-" if value is None else format(value, form)


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write figures with the command of this process and its environment; return the file.

    `name` is the name of a file in `bench/results`, or a path, in both cases without `.json`.
    """
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The first argument is the interpreter's path on this machine.
    command = " ".join(["python", *sys.orig_argv[1:]])
    path.write_text(json.dumps({"command": command, "environment": _environment(), **figures}, indent=2) + "\n")
    return path


def _at(ordered: Sequence[float], position: float) -> float:
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _environment() -> dict[str, Any]:
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "commit": _git("rev-parse", "HEAD"),
        "has_uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_1_min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    return result.stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
