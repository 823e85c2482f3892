"""A bare Serve application on a private cluster, for `start_stop`: `python -m bench.server.bare_serve PORT`."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from serve_app.cli.server.private_cluster import private_ray_environment
from testkit.free_port import free_port


class Stopped(Exception):
    """Signal that SIGTERM has arrived."""


class Bare:
    """Deployment that imports torch and answers every request."""

    def __init__(self) -> None:
        importlib.import_module("torch")

    async def __call__(self) -> str:
        """Answer a request."""
        return "ok"


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="hwb-", dir="/tmp"))
    # The last two are also the settings of Headway's private cluster.
    variables = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5", "RAY_raylet_report_resources_period_milliseconds": "500"}
    os.environ.update(private_ray_environment(folder) | variables)
    import ray  # here, since the import reads the environment
    from ray import serve

    try:
        print("Starting: Ray ...")
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            object_store_memory=256 * 2**20,
            dashboard_host="127.0.0.1",
            dashboard_port=free_port("127.0.0.1"),
            namespace="serve",
            _temp_dir=str(folder / "ray"),
        )
        signal.signal(signal.SIGTERM, stop)
        print("Starting: replicas ...")
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        serve.run(serve.deployment(Bare).bind(), name="bare")
        print("Ctrl-C stops it.", flush=True)
        while True:
            time.sleep(0.1)
    except Stopped:
        serve.shutdown()
        ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stop(signum: int, frame: FrameType | None) -> None:
    """Raise `Stopped`."""
    raise Stopped


if __name__ == "__main__":
    main()
