"""Compilation and loading of the C++ kernels; a machine compiles them once per kind of processor and torch version.

The module imports torch only to load them, so that `headway serve` can have them compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.child_processes import Stalled, run_child
from replicas.model.hardware.processor import cpu_flags

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "cpu_kernels"
_COMPILERS = ("g++", "c++")
# No -ffast-math: a NaN must stay a NaN, so that its sequence fails.
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
_COMPILE_CPU_LIMIT_S = 300.0
_LOCK_LIMIT_S = 3600.0
"""Longest wait for another process that compiles, seconds; its own compiler ends before, unless it makes progress."""
_LOCK_POLL_S = 0.1
_SCRATCH_PREFIX = "compiling-"


class KernelBuildError(Exception):
    """Failure to get a compiled library. The message is the reason."""


def load_kernels(directory: str | None, dtype: torch.dtype) -> bool:
    """Load the kernels; compile them into `directory` if they are not there. Return True if they work for `dtype`.

    Without a directory nothing is compiled or loaded. A failure is logged, and the result is False.
    """
    import torch

    if directory is None or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        torch.ops.load_library(built_library(directory))  # type: ignore[no-untyped-call]
    except (KernelBuildError, OSError) as error:
        _log.warning("serving without compiled CPU kernels, which is slower: %s", error)
        return False
    return True


def can_compile(directory: str | None, dtype: str) -> bool:
    """Return True if a replica on a CPU that has these options compiles the kernels, or finds them compiled."""
    return directory is not None and dtype != "float16" and any(map(shutil.which, _COMPILERS))


def built_library(directory: str, compilers: tuple[str, ...] = _COMPILERS) -> Path:
    """Return the path of the kernels' shared library; compile it into `directory` unless it is there already.

    If several processes call this at once, one compiles and the others wait. The library gets its name by a rename, so
    under that name it is always complete.

    Raises:
        KernelBuildError: there is no compiler, the compiler failed, another process held the lock for too long, or
            `directory` cannot be written.
    """
    try:
        folder = Path(directory).expanduser()
    except RuntimeError as error:  # The user has no home directory.
        raise KernelBuildError(f"{directory}: {error}") from error
    library = folder / f"headway-kernels-{_key()}.so"
    if library.exists():
        return library
    compiler = found_compiler(compilers)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise KernelBuildError(str(error)) from error
    return library


def found_compiler(names: tuple[str, ...] = _COMPILERS) -> str:
    """Return the path of the first C++ compiler of `names` that is installed.

    Raises:
        KernelBuildError: none of them is installed.
    """
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise KernelBuildError(f"none of {', '.join(names)} is installed")
    return compiler


def _key() -> str:
    """Return a hash of everything that the compiled code depends on: torch, flags, processor and sources."""
    digest = hashlib.sha256(repr((version("torch"), _FLAGS, platform.machine(), sorted(cpu_flags()))).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock `path`, which excludes other processes. The system releases it when its holder dies.

    Raises:
        KernelBuildError: another process held the lock for too long.
    """
    with path.open("w") as file:
        end_s = time.monotonic() + _LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise KernelBuildError(f"another process has held {path} for too long") from None
                time.sleep(_LOCK_POLL_S)
        yield


def _compile(compiler: str, library: Path) -> None:
    started_s = time.monotonic()
    _log.info("compiling the CPU kernels with %s, once on this machine", compiler)
    # The holder of the lock removes what a killed process left, although that process's compiler may still run.
    for abandoned in library.parent.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        compile_with_torch(compiler, _SOURCES / "kernels.cpp", output, _FLAGS)
        os.replace(output, library)
    _log.info("compiled %s in %.1f s", library, time.monotonic() - started_s)


def compile_with_torch(compiler: str, source: Path, output: Path, flags: Sequence[str]) -> None:
    """Compile and link one source file that uses torch's C++ interface and the kernels' headers.

    Raises:
        KernelBuildError: the compiler failed or took too long.
    """
    torch_module = find_spec("torch")
    assert torch_module is not None and torch_module.origin is not None
    torch_directory = Path(torch_module.origin).parent
    command = [
        compiler,
        *flags,
        f"-I{_SOURCES}",
        f"-I{torch_directory / 'include'}",
        str(source),
        f"-L{torch_directory / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-o{output}",
    ]
    try:
        run = run_child(f"the compilation of {source.name}", command, _COMPILE_CPU_LIMIT_S)
    except Stalled as error:
        raise KernelBuildError(str(error)) from None
    if run.returncode != 0:
        raise KernelBuildError(f"{compiler} failed: {run.stderr[-2000:]}")
