"""Lines that run, and a registry that shows them and those that ended recently."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.protocol import Band
from replicas.timing.clock import Clock
from router.timeline import Timeline
from serve_app.jobs.api.records import JsonObject
from serve_app.jobs.storage.lines import LeasedLine, LineResult
from serve_app.jobs.storage.rows.batch_queue import OpenBatch
from serve_app.openai.reply.prepared_completion import ID_PREFIXES, PreparedCompletion, RequestView
from serve_app.openai.request.caller import WorkOwner
from serve_app.tracing.tracer import Moment, Trace

MAX_AGE_S = 3600.0


@dataclass(slots=True)
class Attempt:
    """Attempt to answer a line."""

    start: Moment
    timeline: Timeline
    """Timeline up to the preparation."""
    model: str
    trace: Trace | None
    prepared: PreparedCompletion | None = None
    """Completion of the line; None: it is not prepared."""
    error_code: str | None = None
    """Code of the error that ended the attempt."""

    @property
    def slowest(self) -> Timeline:
        """Timeline of the sequence that ended last; before the preparation that of the attempt."""
        return self.timeline if self.prepared is None else self.prepared.timeline

    def end(self, now: float) -> None:
        """Note the end of the attempt."""
        for timeline in (self.timeline, *(() if self.prepared is None else self.prepared.timelines)):
            timeline.ended(now)


@dataclass(slots=True, eq=False)
class LineTask:
    """Line that is being run, owned by one asyncio task."""

    line: LeasedLine
    batch: OpenBatch
    band: Band
    is_sent: bool = False
    """True: it waits for a replica in flow control's queue, or runs on one; False: it is prepared or backs off."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of the line's body that have no effect."""
    attempt: Attempt | None = None
    """Present attempt, or the last one while the line waits to be tried again."""
    result: LineResult | None = None
    """Result; None: the line runs, or was stopped."""

    def describe(self, status: str, now: float) -> JsonObject | None:
        """Return the object `request` of the line's last attempt; None: there was none."""
        attempt = self.attempt
        if attempt is None:
            return None
        view = RequestView(
            request_id=self.line.request_id,
            status=status,
            path=self.batch.endpoint,
            model=attempt.model,
            stream=False,
            owner=WorkOwner(self.band, self.batch.tenant),
            arrival_unix_s=attempt.start.unix_s,
            http_status=None if self.result is None else self.result.status_code,
            error_code=attempt.error_code,
            timeline=attempt.slowest,
            prepared=attempt.prepared,
        )
        return view.describe(now)


@dataclass(frozen=True, slots=True)
class _EndedLine:
    """Line that has ended."""

    tenant: str
    ended_s: float
    description: JsonObject


class LineRegistry:
    """Registry of the lines of one jobs process by request id: those that run, and those that ended recently.

    At most `max_ended` that ended are kept, for at most `MAX_AGE_S`. It holds no text of prompts or outputs.
    """

    def __init__(self, clock: Clock, max_ended: int = 1000) -> None:
        self._clock = clock
        self._max_ended = max_ended
        self._running: dict[str, LineTask] = {}
        self._ended: OrderedDict[str, _EndedLine] = OrderedDict()

    @contextlib.contextmanager
    def running(self, line_task: LineTask) -> Iterator[None]:
        """Show a line while the context lasts, and for a while after."""
        request_id = line_task.line.request_id
        self._running[request_id] = line_task
        try:
            yield
        finally:
            # A line that is raised to another band runs in two tasks for a moment.
            if self._running.get(request_id) is line_task:
                del self._running[request_id]
                self._keep(request_id, line_task)

    def find(self, tenant: str | None, request_id: str) -> JsonObject | None:
        """Return the description of a line; `tenant` None: of any tenant. None: there is no such line."""
        self._trim()
        for prefix in ("", *ID_PREFIXES):
            key = request_id.removeprefix(prefix)
            line_task, ended = self._running.get(key), self._ended.get(key)
            if line_task is not None and tenant in (None, line_task.batch.tenant):
                return line_task.describe("running", self._clock.monotonic())
            if ended is not None and tenant in (None, ended.tenant):
                return ended.description
        return None

    def _keep(self, request_id: str, line_task: LineTask) -> None:
        now, result = self._clock.monotonic(), line_task.result
        status = "cancelled" if result is None else "completed" if result.error is None else "failed"
        description = line_task.describe(status, now)
        if description is not None:
            self._ended[request_id] = _EndedLine(line_task.batch.tenant, now, description)
            self._ended.move_to_end(request_id)
            self._trim()

    def _trim(self) -> None:
        oldest_s = self._clock.monotonic() - MAX_AGE_S
        while self._ended and (
            len(self._ended) > self._max_ended or next(iter(self._ended.values())).ended_s < oldest_s
        ):
            self._ended.popitem(last=False)
