"""Services behind the HTTP application."""

from __future__ import annotations

from dataclasses import dataclass

from router.autoscaling_loop import AutoscalingLoop
from router.dispatch import Dispatcher
from serve_app.jobs.access import JobsAccess


@dataclass(frozen=True, slots=True)
class Backends:
    """Services that the endpoints use."""

    dispatcher: Dispatcher
    autoscaling: AutoscalingLoop | None = None
    """Shown in `/load`; None: the number of replicas is fixed."""
    jobs: JobsAccess | None = None
    """None: there are no endpoints of files, batches and jobs."""
