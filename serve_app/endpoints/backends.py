"""Services behind the HTTP endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from router.dispatch import Dispatcher
from router.scaling.autoscaling_loop import AutoscalingLoop
from serve_app.jobs.access import JobsAccess


@dataclass(frozen=True, slots=True)
class Backends:
    """Bundle of the services that the endpoints use."""

    dispatcher: Dispatcher
    autoscaling: AutoscalingLoop | None = None
    """Autoscaling loop, whose decision `/load` shows; None: `/load` shows none."""
    jobs: JobsAccess | None = None
    """Access to the jobs service; None: there are no endpoints for files, batches and jobs."""
