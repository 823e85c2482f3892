"""Checks of this machine for `headway doctor`: hardware, versions, limits, folders, ports. None imports torch."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.filesize import decimal

from replicas.model.hardware.limits import cpu_limit, memory_limit
from serve_app.models.gguf import MODELS_DIRECTORY

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_PACKAGES = ("headway-serve", "torch", "transformers", "ray")
_LEAST_MEMORY_BYTES = 2 * 10**9
_LEAST_DISK_BYTES = 5 * 10**9
_LEAST_SHARED_BYTES = 512 * 2**20
"""Ray's object store of the private cluster, twice."""
_LEAST_OPEN_FILES = 4096
_INHERITED = re.compile(r"^(RAY|HEADWAY|HF|OMP|MKL|CUDA|PYTHON|LD|TMPDIR$)|_proxy$", re.IGNORECASE)
_COMMAND_LIMIT_S = 10.0


class Status(Enum):
    """Result of a check: all is well, it will be slow or limited, or it will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    status: Status
    finding: str
    advice: str = ""
    """Remedy; empty if nothing is to be done."""


def machine_checks(port: int) -> Iterator[Check]:
    """Yield the checks of this machine; `port` is the one that the server is to use."""
    yield _processor()
    yield _memory()
    yield _gpu()
    yield _versions()
    yield _compiler()
    yield folder_check("models", MODELS_DIRECTORY.expanduser(), _LEAST_DISK_BYTES)
    yield folder_check("temporary files", Path(tempfile.gettempdir()), _LEAST_SHARED_BYTES)
    yield _shared_memory()
    yield _open_files()
    yield _variables()
    yield port_check(port)


def folder_check(name: str, folder: Path, least_bytes: int) -> Check:
    """Check that a folder can be written and has room; if it does not exist, check its nearest existing parent."""
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    finding = f"{folder}, {decimal(free)} free"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, Status.FAIL, finding, f"{there} cannot be written: change its mode or its owner")
    if free < least_bytes:
        return Check(name, Status.WARN, finding, f"less than {decimal(least_bytes)}: make room")
    return Check(name, Status.OK, finding)


def port_check(port: int) -> Check:
    """Check that a server can listen on a port of the loopback address."""
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = f"a server may be running; another one needs `headway serve --port {port + 1}`"
            return Check(name, Status.WARN, error.strerror or str(error), advice)
    return Check(name, Status.OK, "free")


def _processor() -> Check:
    limit = cpu_limit()
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    sets = [name for name in _INSTRUCTION_SETS if name in flags]
    name = fields.get("model name") or platform.processor() or platform.machine()
    finding = f"{name}, {limit.num_cpus:g} cores ({limit.source}), {', '.join(sets) or 'unknown instruction sets'}"
    if limit.num_cpus < 1:
        return Check("processor", Status.WARN, finding, "less than one core: a start takes minutes, answers are slow")
    if "x86" in platform.machine() and flags and "avx2" not in flags:
        return Check("processor", Status.WARN, finding, "without AVX2 the model is very slow")
    return Check("processor", Status.OK, finding)


def _memory() -> Check:
    limit = memory_limit()
    finding = f"{decimal(limit.total)} ({limit.source}), {decimal(limit.free)} free"
    if limit.free < _LEAST_MEMORY_BYTES:
        advice = f"less than {decimal(_LEAST_MEMORY_BYTES)} is free: end other programs, or raise the container's limit"
        return Check("memory", Status.WARN, finding, advice)
    return Check("memory", Status.OK, finding)


def _gpu() -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check("GPU", Status.OK, "none; models run on the processor")
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return Check("GPU", Status.WARN, f"nvidia-smi fails: {error}", "check the driver; models run on the processor")
    return Check("GPU", Status.OK, "; ".join(listed.stdout.strip().splitlines()))


def _versions() -> Check:
    versions, missing = [f"python {platform.python_version()}"], []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check("versions", Status.FAIL, ", ".join(versions), f"install {', '.join(missing)}: `make venv`")
    return Check("versions", Status.OK, ", ".join(versions))


def _compiler() -> Check:
    compiler = next(filter(None, map(shutil.which, ("g++", "c++"))), None)
    if compiler is None:
        advice = "install g++: the kernels for the processor are compiled at the first start"
        return Check("compiler", Status.WARN, "no C++ compiler", advice)
    return Check("compiler", Status.OK, compiler)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("/dev/shm", Status.OK, "this system has none")
    usage = shutil.disk_usage(folder)
    finding = f"{decimal(usage.total)}, {decimal(usage.free)} free"
    if usage.free < _LEAST_SHARED_BYTES:
        return Check(
            "/dev/shm", Status.WARN, finding, "Ray will use the disk, which is slow: `docker run --shm-size=1g`"
        )
    return Check("/dev/shm", Status.OK, finding)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finding = f"{_limit_text(soft)}, at most {_limit_text(hard)}"
    if hard != resource.RLIM_INFINITY and hard < _LEAST_OPEN_FILES:
        advice = f"each open stream needs a file: raise the hard limit to {_LEAST_OPEN_FILES} or more (`ulimit -Hn`)"
        return Check("open files", Status.WARN, finding, advice)
    return Check("open files", Status.OK, finding)


def _variables() -> Check:
    """List the variables that change how child processes run: Ray's own and those of proxies, threads and libraries."""
    names = sorted(name for name in os.environ if _INHERITED.search(name))
    return Check("variables", Status.OK, ", ".join(names) or "none that children inherit changes a start")


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
