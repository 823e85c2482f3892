"""The Serve application on a private cluster: its deployment, its readiness, and its orderly end."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click
import httpx
import psutil

from replicas.child_processes import Progress, work_of
from replicas.protocol import ModelCard
from serve_app.cli.server.ports import Address
from serve_app.config import HeadwayConfig

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

NAME = "headway"
"""Name of the Serve application."""
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Model): (.+)$", re.MULTILINE)
"""Last line of a traceback, which has the message of the error."""
_ANSWER_LIMIT_S = 10.0
_READY = (httpx.codes.OK, httpx.codes.FORBIDDEN)
"""Answers of a ready ingress; the second one if `allowed_hosts` lacks this machine's names."""
_STOP_LIMIT_S = 10.0
_DEPLOY_PERIOD_S = 0.1
_CPU_STEP_S, _READ_STEP_BYTES = 5.0, 2**24


class ApplicationFailed(Exception):
    """Failure of the application to start or to run; the message is the reason."""


def deploy(config: HeadwayConfig, address: Address, access_log_socket: str | None, ray_dashboard_url: str) -> None:
    """Start Serve on the cluster of this process, and deploy the application; replicas and proxies may start later.

    Serve's HTTP servers listen at `address`, and the ingresses behind HAProxy on the same host. The ingresses send
    access lines to `access_log_socket`; None: to none. Their pages link to `ray_dashboard_url`.
    """
    from ray import serve
    from ray.exceptions import RayActorError

    from serve_app.app import build_with

    try:
        built = build_with(config, access_log_socket=access_log_socket, ray_dashboard_url=ray_dashboard_url)
    except click.ClickException as error:  # No node has the GPUs of a replica.
        raise ApplicationFailed(f"the application did not start: {error.message}") from error
    target = serve.RunTarget(built, name=NAME)
    with ThreadPoolExecutor(1, "serve-start") as executor:
        # Serve's start waits for its proxies. The application needs only the controller, which is there at once.
        started = executor.submit(serve.start, http_options={"host": address.host, "port": address.port})
        while not started.done() and not _has_controller():
            time.sleep(_DEPLOY_PERIOD_S)
        if started.done():
            started.result()
        # Both calls wait for Serve's proxies, for a minute or until one ends. `wait_until_ready` waits on.
        with contextlib.suppress(TimeoutError, RayActorError):
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        with contextlib.suppress(TimeoutError, RayActorError):
            started.result()


def _has_controller() -> bool:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME

    names = ray.util.list_named_actors(all_namespaces=True)
    return any(actor["name"] == SERVE_CONTROLLER_NAME for actor in names)


def wait_until_ready(url: str, limit_s: float, pause: Callable[[], None]) -> None:
    """Return when every replica runs and the ingress at `url` is ready; `pause` is called between two looks.

    Raises:
        ApplicationFailed: a replica's constructor has failed, or Serve has ended.
        Stalled: nothing has progressed for `limit_s` seconds.
    """
    progress = Progress(limit_s)
    with httpx.Client(timeout=_ANSWER_LIMIT_S, trust_env=False) as client:
        while True:
            application = _application()
            if application is None:
                raise ApplicationFailed("the application did not start: Ray Serve has ended")
            if application.status == "DEPLOY_FAILED":
                raise ApplicationFailed(f"the application did not start: {_last_error(application)}")
            if application.status == "RUNNING":
                answer = "none"
                with contextlib.suppress(httpx.TransportError):
                    status = client.get(f"{url}/health/ready").status_code
                    if status in _READY:
                        return
                    answer = str(status)
                progress.note(f"the HTTP proxy at {url} (its last answer: {answer})", answer)
            else:
                loading = [name for name, part in application.deployments.items() if part.status != "HEALTHY"]
                states = tuple(str(part.replica_states) for part in application.deployments.values())
                progress.note(f"the start of {', '.join(loading)}", (states, *map(_work_of, loading)))
            pause()


def _work_of(deployment: str) -> frozenset[tuple[int, int, int]]:
    """Return the work of a deployment's processes, in steps that an idle process takes minutes for."""
    title = f"ray::ServeReplica:{NAME}:{deployment}"
    work = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                cpu_s, num_bytes = work_of(process)
                work.add((process.pid, int(cpu_s / _CPU_STEP_S), num_bytes // _READ_STEP_BYTES))
    return frozenset(work)


def jobs_state(url: str) -> str | None:
    """Return the state of the jobs process in `/health`; None: `/health` does not say it."""
    try:
        answer = httpx.get(f"{url}/health", timeout=_ANSWER_LIMIT_S, trust_env=False)
    except httpx.TransportError:
        return None
    state = answer.json().get("jobs") if answer.is_success else None
    return state if isinstance(state, str) else None


def model_card(limit_s: float) -> ModelCard:
    """Return the description of the model that a replica serves.

    Raises:
        TimeoutError: no replica has answered within `limit_s` seconds.
    """
    from ray import serve

    handle = serve.get_deployment_handle("Model", NAME)
    card: ModelCard = handle.describe.remote().result(timeout_s=limit_s)
    return card


def drain(limit_s: float) -> None:
    """Have every ingress refuse further requests; return when the running ones have ended, or after `limit_s`."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    with contextlib.suppress(RayError, RayServeException, TimeoutError):  # an ingress that has died holds no request
        draining = serve.get_deployment_handle("Ingress", NAME).broadcast("drain", limit_s)
        draining.results(timeout_s=limit_s + _ANSWER_LIMIT_S, return_exceptions=True)


def stop() -> None:
    """Stop the application: the database is closed, and Serve has ended. It is drained before."""
    from ray import serve

    # In a thread, since Serve's own limit is longer.
    stopping = threading.Thread(target=serve.shutdown, name="stopping", daemon=True)
    stopping.start()
    stopping.join(_STOP_LIMIT_S)


def _application() -> ApplicationStatusOverview | None:
    """Return Serve's report of the application; None if there is none now."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return serve.status().applications.get(NAME)
    except (RayError, RayServeException):
        return None


def _last_error(application: ApplicationStatusOverview) -> str:
    """Return the error that a replica's constructor has raised last."""
    messages = "\n".join(deployment.message for deployment in application.deployments.values())
    errors: list[str] = _ERROR_LINE.findall(messages)
    return errors[-1] if errors else (application.message.strip().splitlines() or [application.status])[-1]
