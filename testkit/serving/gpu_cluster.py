"""A private one-node Ray cluster with a fake GPU: `python -m testkit.serving.gpu_cluster PORT`.

Serve listens on PORT. Ray's environment is that of the caller. The process prints its addresses in one line of JSON,
and ends when its input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile

import ray
from ray import serve

from testkit.free_port import free_port


def main() -> None:
    folder = tempfile.mkdtemp(prefix="hwt-", dir="/tmp")
    try:
        context = ray.init(
            address="local",
            num_cpus=8,
            num_gpus=1,
            object_store_memory=128 * 2**20,
            include_dashboard=True,
            dashboard_port=free_port("127.0.0.1"),
            namespace="serve",
            log_to_driver=False,
            _temp_dir=folder,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        addresses = {"url": f"http://127.0.0.1:{sys.argv[1]}", "dashboard_url": f"http://{context.dashboard_url}"}
        ray_environment = {
            "RAY_ADDRESS": context.address_info["gcs_address"],
            "RAY_DASHBOARD_ADDRESS": addresses["dashboard_url"],
        }
        token_path = os.environ["RAY_AUTH_TOKEN_PATH"]
        print(json.dumps({**addresses, **ray_environment, "token_path": token_path}), flush=True)
        sys.stdin.read()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
