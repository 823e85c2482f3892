"""Settings of the application's processes: the type of each process has exactly the settings that it reads.

A deployment is bound to them, and its version is made from them. So a change of a setting replaces the processes that
read it, and no others. `HeadwayConfig` composes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from replicas.options import ReplicaOptions
from replicas.protocol import Band
from router.flow.flow_control import FlowLimits
from router.scaling.autoscaling import AutoscalingSettings
from router.types import LatencyTargets
from router.watch import WatchSettings
from serve_app.http.settings import IngressSettings
from serve_app.jobs.api.records import JobsSettings
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.tokenize.work_queue import WorkLimits
from serve_app.tracing.settings import TracingSettings


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """Settings of a model replica."""

    model_name: str
    """Name of the model in metrics."""
    replica: ReplicaOptions
    load_poll_period_s: float
    """Seconds between two polls by an ingress."""

    @property
    def model_path(self) -> str:
        """Directory, GGUF file or hub id of the model."""
        return self.replica.model.path

    def with_model(self, path: str) -> ModelProcess:
        """Return the settings with the model at `path`."""
        return replace(self, replica=replace(self.replica, model=replace(self.replica.model, path=path)))


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Settings of the router in an ingress or a jobs worker."""

    model_name: str
    """Name of the model in metrics."""
    flow: FlowLimits
    watch: WatchSettings
    autoscaling: AutoscalingSettings
    targets: Mapping[Band, LatencyTargets]
    has_prefix_cache: bool
    """True if replicas share the KV blocks of equal beginnings."""


@dataclass(frozen=True, slots=True)
class IngressProcess:
    """Settings of an HTTP ingress."""

    routing: RoutingSettings
    http: IngressSettings
    jobs: JobsSettings
    files_url: str
    """URL of the folder that holds the bytes of files, for fsspec."""
    webhook_allowed_hosts: str
    """Hosts that may receive webhooks although they are not public."""

    @property
    def model_path(self) -> str:
        """Directory, GGUF file or hub id of the model."""
        return self.http.model

    def with_model(self, path: str) -> IngressProcess:
        """Return the settings with the model at `path`."""
        return replace(self, http=replace(self.http, model=path))


@dataclass(frozen=True, slots=True)
class LineSettings:
    """Settings of the requests in the lines of batches."""

    model: str
    """Directory or hub id of the tokenizer and the chat template."""
    limits: RequestLimits
    num_tokenizer_threads: int
    work_limits: WorkLimits
    tool_call_parser: str | None
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class JobsProcess:
    """Settings of a jobs worker."""

    routing: RoutingSettings
    jobs: JobsSettings
    lines: LineSettings
    tracing: TracingSettings
    data_dir: str
    """Directory for the webhook secret, and for what has no URL of its own."""
    database_url: str
    """URL of the database of files, batches and jobs."""
    files_url: str
    """URL of the folder that holds the bytes of files, for fsspec."""
    webhook_secret: str | None
    """Key that signs webhooks; None: one is kept in `data_dir`."""
    webhook_allowed_hosts: str
    """Hosts that may receive webhooks although they are not public."""

    @property
    def model_path(self) -> str:
        """Directory, GGUF file or hub id of the model."""
        return self.lines.model

    def with_model(self, path: str) -> JobsProcess:
        """Return the settings with the model at `path`."""
        return replace(self, lines=replace(self.lines, model=path))
