"""A served application for an experiment: a private Ray cluster and the application on free ports.

As a program, `python -m bench.serving --app bench.timed_app:build key=value`, it serves in the foreground. It prints
its addresses in one line of JSON. It stops everything on SIGTERM or when its input ends. `serving` runs that program.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import get_type_hints

import httpx

from serve_app.cli.server.ports import LOOPBACK, Address
from serve_app.cli.server.private_cluster import private_cluster
from serve_app.config import STREAM_DRAIN_S
from testkit.free_port import free_port
from testkit.serving.served import ROOT, Served, answers, running, wait_for

TIMED = "bench.timed_app:build"
REAL = "serve_app.app:build"
_START_LIMIT_S = 300.0


@contextlib.contextmanager
def serving(
    app: str, arguments: Mapping[str, object], throughput_profile: bool = False, checkout: str | None = None
) -> Iterator[Served]:
    """Serve within the context; end all processes afterwards.

    `app` is `TIMED` or `REAL`, or any other `module:builder`; `arguments` are the fields of its config. `checkout` is
    the directory of the code that runs; None: this code.
    """
    options = ["--app", app, "--throughput"] if throughput_profile else ["--app", app]
    fields = [f"{name}={value}" for name, value in arguments.items()]
    with (
        tempfile.TemporaryDirectory(prefix="hw-bench-") as home,
        running("bench.serving", [*options, *fields], Path(home), Path(checkout or ROOT)) as served,
    ):
        yield served


def main() -> None:
    """Serve in the foreground until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", default=TIMED, help="module:builder")
    parser.add_argument("--throughput", action="store_true", help="HAProxy in front and Serve's throughput flags")
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    options = parser.parse_args()
    address = Address(LOOPBACK, free_port(LOOPBACK))
    url = f"http://{address}"
    fields = dict(argument.split("=", 1) for argument in options.arguments)
    haproxy_address = address if options.throughput else None
    stream_drain_s = float(fields.get("stream_drain_s", STREAM_DRAIN_S))
    with private_cluster(os.cpu_count() or 1, haproxy_address, stream_drain_s=stream_drain_s) as cluster:
        from ray import serve

        try:
            _run(options.app, fields, url)
            places = {"url": url, "dashboard_url": cluster.dashboard_url, "token_path": str(cluster.token_path)}
            print(json.dumps(places), flush=True)
            # ray.init has made SIGTERM raise SystemExit. The input ends with the parent: a killed experiment leaves
            # no process behind.
            sys.stdin.read()
        finally:
            serve.shutdown()


def _run(app: str, fields: dict[str, str], url: str) -> None:
    """Start the application; return when the ingress is ready."""
    from ray import serve

    module, name = app.split(":")
    builder = getattr(importlib.import_module(module), name)
    config = get_type_hints(builder).get("config")
    serve.start(http_options={"host": "127.0.0.1", "port": httpx.URL(url).port})
    application = builder(fields) if config is None else builder(config.model_validate(fields))
    serve.run(application, name="headway", route_prefix="/")
    wait_for(partial(answers, f"{url}/health/ready"), "the ingress is ready", _START_LIMIT_S, 0.2)


if __name__ == "__main__":
    main()
