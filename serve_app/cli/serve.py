"""Serve a model from this machine, in the foreground: what `make serve` runs.

Starts a Ray cluster of its own and runs the application on it with `serve run`; SIGTERM or SIGINT
stops everything that was started.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import signal
import socket
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import httpx
import pydantic
import typer

from serve_app.cli.private_cluster import PrivateCluster, private_cluster
from serve_app.config import HeadwayConfig

_POLL_PERIOD_S = 0.25
_LOOPBACK_HOSTS = "localhost,127.0.0.1,[::1]"


class Profile(Enum):
    """Serving profiles."""

    DEFAULT = "default"
    """Serve's own HTTP proxy."""
    THROUGHPUT = "throughput"
    """HAProxy in front of the ingresses and Serve's throughput flags: several times the requests a second."""


class _Stopped(Exception):
    """SIGTERM or SIGINT arrived."""


def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields of HeadwayConfig.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    profile: Annotated[Profile, typer.Option(help="throughput: HAProxy in front.")] = Profile.DEFAULT,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Host headers to answer, separated by commas; * for all. Default: this machine's loopback names when "
            "listening on loopback, else all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model from this machine until SIGTERM or Ctrl-C."""
    arguments = arguments or []
    is_private = is_loopback(host)
    if allowed_hosts is None and is_private:
        allowed_hosts = _LOOPBACK_HOSTS
    if allowed_hosts is not None:
        arguments = [f"allowed_hosts={allowed_hosts}", *arguments]
    config = _read_config(arguments)
    _check_model(config)
    if not is_private and config.ingress_settings().api_key_file is None:
        _warn(f"everybody who reaches {host}:{port} may use the model: no api_key_file is set")
    _check_port(host, port)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    num_cpus = max(os.cpu_count() or 1, math.ceil(_cpus_needed(config)))
    try:
        print(f"Starting {config.model_name} ...", flush=True)
        with private_cluster(num_cpus, profile is Profile.THROUGHPUT) as cluster:
            _serve_on(cluster, host, port, arguments, config)
    except _Stopped:
        print("Stopped.", flush=True)


def _serve_on(cluster: PrivateCluster, host: str, port: int, arguments: list[str], config: HeadwayConfig) -> None:
    """Run the application on a cluster until stopped; ends it before returning."""
    from ray import serve as ray_serve

    # ray.init puts handlers of its own in place of ours.
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    ray_serve.start(http_options={"host": host, "port": port})
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address]
    # A session of its own, so that Ctrl-C reaches it through us only, after the running requests.
    run = subprocess.Popen([*command, "serve_app.app:build", *arguments], start_new_session=True)
    try:
        _wait_until_ready(run, f"http://{_reachable(host)}:{port}")
        _print_how_to_use(f"http://{_reachable(host)}:{port}", cluster, config)
        while run.poll() is None:
            if _has_make_been_interrupted():
                raise _Stopped
            _wait(run)
        raise typer.Exit(code=run.returncode or 1)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            try:
                run.wait(timeout=config.graceful_shutdown_timeout_s + 20.0)
            except subprocess.TimeoutExpired:
                run.kill()


def _wait_until_ready(run: subprocess.Popen[bytes], url: str) -> None:
    """Return once every replica runs and the ingress says that it is ready."""
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while run.poll() is None:
            if _is_running():
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{url}/health/ready").status_code == httpx.codes.OK:
                        return
            if _has_make_been_interrupted():
                raise _Stopped
            _wait(run)
    _fail(f"the application did not start; `serve run` ended with {run.returncode}", code=1)


def _is_running() -> bool:
    """Whether Serve says that all replicas of the application run."""
    from ray import serve as ray_serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        applications = ray_serve.status().applications
    except (RayError, RayServeException):  # `serve run` shuts Serve down when the application fails
        return False
    return any(application.status == "RUNNING" for application in applications.values())


def _wait(run: subprocess.Popen[bytes]) -> None:
    """Wait a moment, or until `run` ends."""
    try:
        run.wait(timeout=_POLL_PERIOD_S)
    except subprocess.TimeoutExpired:
        return


def _print_how_to_use(url: str, cluster: PrivateCluster, config: HeadwayConfig) -> None:
    body = f'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(
        f"\nServing {config.model_name} at {url}\n"
        f"Ray dashboard at {cluster.dashboard_url}; it asks for the token in {cluster.token_path}\n"
        f"Ray's commands, such as `ray status`, need this first: . {cluster.environment_path}\n\n"
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n",
        flush=True,
    )


def _read_config(arguments: list[str]) -> HeadwayConfig:
    fields: dict[str, str] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or not value:
            _fail(f"'{argument}' is not of the form key=value")
        fields[key] = value
    try:
        return HeadwayConfig.model_validate(fields)
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        _fail("; ".join(problem.removeprefix(": ") for problem in problems))


def _check_model(config: HeadwayConfig) -> None:
    """Refuse a directory that holds no model; a hub id is looked up when it is loaded."""
    path = Path(config.model_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            _fail(f"model: {path} has no config.json")
    elif config.model_path.startswith(("/", ".", "~")) or config.model_path.count("/") > 1:
        _fail(f"model: there is no directory {config.model_path}")


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            _fail(f"cannot listen on {host}:{port}: {error.strerror}; choose another port (make serve PORT=...)")


def is_loopback(host: str) -> bool:
    """Return whether `host` names addresses that only this machine reaches; a name that is unknown does not."""
    try:
        found = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return False
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in found)


def _cpus_needed(config: HeadwayConfig) -> float:
    ingresses = config.cpus_per_ingress * config.num_ingress_replicas
    return config.cpus_per_replica * config.effective_max_replicas + ingresses + config.cpus_per_jobs


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _has_make_been_interrupted() -> bool:
    """Whether our parent is a `make` that got a SIGINT for itself alone.

    It then waits for us without a word (it passes on SIGTERM only), inside its handler: that is, with SIGINT blocked.
    """
    parent = Path(f"/proc/{os.getppid()}/status")
    if not parent.exists():
        return False
    fields = dict(line.split(":\t", 1) for line in parent.read_text().splitlines())
    return fields["Name"] == "make" and bool(int(fields["SigBlk"], 16) & 1 << (signal.SIGINT - 1))


def _stop(signum: int, frame: FrameType | None) -> None:
    """Stop, once: a second signal must not interrupt the stopping, which is bounded in time."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise _Stopped


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(code=code)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)

if __name__ == "__main__":
    app()
