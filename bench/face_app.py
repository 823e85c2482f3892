"""The timed application with a switch for all that shows what it does: `bench.face_cost` serves it.

While the file `switch` exists, metrics are not given to Ray, requests are in no registry, and no part of their time is
measured. Each process looks for the file five times a second.

No `from __future__ import annotations` here: Serve reads the annotation of `build` at run time.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from ray import serve

from bench.timed_app import TimedBackendLoader, TimedConfig
from replicas.engine.sequence import Phase, PhaseTimes
from router.timeline import Part, Seconds, Timeline
from serve_app.app import build_with
from serve_app.config import HeadwayConfig
from serve_app.deployments import process
from serve_app.http.request_registry import RequestRegistry
from serve_app.metrics import HttpMetrics, OutputMetrics
from serve_app.process_settings import RoutingSettings
from testkit.engine.timed_runner import STEP_TIMES

if TYPE_CHECKING:
    from replicas.model_replica import Backend
    from replicas.options import ReplicaOptions
    from router.balancing.load_table import LoadTable
    from router.flow.flow_control import FlowController
    from router.types import RouterObserver

_LOOK_S = 0.2
_EXPORTING = ("serve_app.deployments.process", "serve_app.deployments.model", "serve_app.deployments.jobs")


class FaceConfig(TimedConfig):
    """Configuration of the application: that of a timed one, and the switch."""

    switch: str = Field(min_length=1)
    """Path of the file that switches off while it exists."""


def build(config: FaceConfig) -> serve.Application:
    """Return the application, for `bench.serving`."""
    plain = HeadwayConfig(**config.model_dump(include=set(HeadwayConfig.model_fields)))
    loader = TimedBackendLoader(STEP_TIMES[config.step_times], config.num_blocks, config.detokenize)
    return build_with(plain, SwitchedLoader(loader, config.switch), SwitchedFlow(config.switch))


@dataclass(frozen=True, slots=True)
class SwitchedLoader:
    """Factory of a replica's backend that installs the switch in the replica's process."""

    loader: TimedBackendLoader
    path: str

    def __call__(self, options: "ReplicaOptions") -> "Backend":
        """Return the backend."""
        Switch(Path(self.path)).install()
        return self.loader(options)


@dataclass(frozen=True, slots=True)
class SwitchedFlow:
    """Factory of the default flow control that installs the switch in the process of an ingress or of the jobs."""

    path: str

    def __call__(self, settings: RoutingSettings, table: "LoadTable", observer: "RouterObserver") -> "FlowController":
        """Return the flow control."""
        Switch(Path(self.path)).install()
        return process.late_binding_flow(settings, table, observer)


class Switch:
    """Switch of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_on = True
        """False: the parts behind the switch do nothing."""

    def install(self) -> None:
        """Put the switch in front of all that shows what this process does."""
        threading.Thread(target=self._look, daemon=True).start()
        for name in _EXPORTING:
            if name in sys.modules:
                self._gate_exports(sys.modules[name])
        for owner, name in (
            (RequestRegistry, "begin"), (RequestRegistry, "end"), (HttpMetrics, "spent"), (OutputMetrics, "chosen"),
        ):  # fmt: skip
            self.gate(owner, name, lambda *_: None)
        self.gate(Timeline, "_spend", _only_mark)
        self.gate(Timeline, "_news", lambda *_: {})
        self.gate(PhaseTimes, "enter", _only_phase)

    def _look(self) -> None:
        while True:
            self.is_on = not self._path.exists()
            time.sleep(_LOOK_S)

    def gate(self, owner: type, name: str, instead: Callable[..., Any]) -> None:
        """Put the switch in front of a method: while it is off, `instead` is called."""
        original = getattr(owner, name)

        def gated(*arguments: Any) -> Any:
            return original(*arguments) if self.is_on else instead(*arguments)

        setattr(owner, name, gated)

    def _gate_exports(self, module: Any) -> None:
        original = module.export_forever

        async def gated(export: Callable[[], Any]) -> None:
            await original(lambda: export() if self.is_on else asyncio.sleep(0))

        module.export_forever = gated


def _only_mark(timeline: Any, now: float, then: Part, split: Seconds | None = None) -> None:
    timeline._mark_s, timeline._open = max(now, timeline._mark_s), then


def _only_phase(phases: PhaseTimes, phase: Phase, now: float) -> None:
    phases.phase = phase
