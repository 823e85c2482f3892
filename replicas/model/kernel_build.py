"""Compiling and loading the C++ kernels, once on each machine for each kind of processor and each version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from replicas.model.precision import cpu_flags

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "cpu_kernels"
_DTYPES = (torch.float32, torch.bfloat16)
_COMPILERS = ("g++", "c++")
# No -ffast-math: a NaN must stay one, so that the sequence it belongs to is found out.
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
_COMPILE_LIMIT_S = 300.0
_LOCK_POLL_S = 0.1
_SCRATCH_PREFIX = "compiling-"


class KernelBuildError(Exception):
    """There is no compiled library, and none can be made here; the message says why."""


def load_kernels(directory: str | None, dtype: torch.dtype) -> bool:
    """Make the kernels callable, compiling them into `directory` if need be; whether they now are, for `dtype`.

    Without a directory none are compiled.
    """
    if directory is None or dtype not in _DTYPES:
        return False
    try:
        torch.ops.load_library(built_library(directory))  # type: ignore[no-untyped-call]
    except (KernelBuildError, OSError) as error:
        _log.warning("serving without compiled CPU kernels, which is slower: %s", error)
        return False
    return True


def built_library(directory: str, compilers: tuple[str, ...] = _COMPILERS) -> Path:
    """The shared library of the kernels, compiled into `directory` unless it is there already.

    Of several processes that ask at once one compiles, and the others wait for it. A library is complete from the
    moment that it has its name.

    Raises:
        KernelBuildError: no compiler, or it failed, or `directory` cannot be written.
    """
    try:
        folder = Path(directory).expanduser()
    except RuntimeError as error:  # there is no home
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
    """The first C++ compiler of these that is installed.

    Raises:
        KernelBuildError: none is.
    """
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise KernelBuildError(f"none of {', '.join(names)} is installed")
    return compiler


def _key() -> str:
    """Names everything that the compiled code depends on."""
    digest = hashlib.sha256(repr((torch.__version__, _FLAGS, platform.machine(), sorted(cpu_flags()))).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes; the system gives it back when its holder dies.

    Raises:
        KernelBuildError: it was not free for too long.
    """
    with path.open("w") as file:
        end_s = time.monotonic() + 2 * _COMPILE_LIMIT_S
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
    # Whoever holds the lock may take away what one that was killed has left; its compiler may still run.
    for abandoned in library.parent.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        compile_with_torch(compiler, _SOURCES / "kernels.cpp", output, _FLAGS)
        os.replace(output, library)
    _log.info("compiled %s in %.1f s", library, time.monotonic() - started_s)


def compile_with_torch(compiler: str, source: Path, output: Path, flags: Sequence[str]) -> None:
    """Compile and link one file that uses torch's C++ interface and the kernels' headers.

    Raises:
        KernelBuildError: the compiler failed, or took too long.
    """
    torch_directory = Path(torch.__file__).parent
    command = [
        compiler,
        *flags,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{_SOURCES}",
        f"-I{torch_directory / 'include'}",
        str(source),
        f"-L{torch_directory / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-o{output}",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
    except subprocess.CalledProcessError as error:
        raise KernelBuildError(f"{compiler} failed: {error.stderr[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{compiler} took more than {_COMPILE_LIMIT_S:.0f} s") from error
