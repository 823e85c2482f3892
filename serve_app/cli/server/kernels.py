"""CPU kernels of `headway serve`: compiled while the model is prepared, before Ray starts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from replicas.model.hardware.kernel_build import KernelBuildError, built_library, can_compile
from serve_app.cli.server.start_report import Steps
from serve_app.config import HeadwayConfig
from serve_app.preflight.checkpoint import may_use_gpu


@contextlib.contextmanager
def kernels_compiled(config: HeadwayConfig) -> Iterator[None]:
    """Compile the CPU kernels beside the block if they are needed and not there; wait for them at its end.

    Ray's processes compute even while they wait: on a slow machine a compilation beside them takes twice as long. After
    a failure the replica tries again, and says what it is without them.
    """
    options = config.replica_options().model
    directory = options.kernel_cache_dir
    if directory is None or may_use_gpu(config) or not can_compile(directory, options.dtype):
        yield
        return
    compilation = threading.Thread(target=_compile, args=(directory,), name="compilation", daemon=True)
    compilation.start()
    yield
    if compilation.is_alive():
        with contextlib.closing(Steps(sys.stderr)) as steps:
            steps.begin("Compiling kernels for this processor, once ...")
            compilation.join()


def _compile(directory: str) -> None:
    with contextlib.suppress(KernelBuildError):
        built_library(directory)
