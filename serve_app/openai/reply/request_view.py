"""View of one completion, running or ended, without its text."""

from __future__ import annotations

from dataclasses import dataclass

from router.timeline import Timeline
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.reply.request_metrics import request_metrics
from serve_app.openai.request.caller import WorkOwner, tier_of


@dataclass(frozen=True, slots=True)
class RequestView:
    """View of a completion at one moment."""

    request_id: str
    status: str
    """Status: running, cancelling, completed, cancelled or failed."""
    path: str
    model: str
    stream: bool
    owner: WorkOwner
    arrival_unix_s: float
    http_status: int | None
    error_code: str | None
    timeline: Timeline
    """Timeline of the sequence that ended last, or of one that runs."""
    prepared: PreparedCompletion | None
    """Completion; None: it is not prepared."""

    def describe(self, now: float) -> JsonObject:
        """Return the object `request`; `now` is in monotonic seconds."""
        prepared, part = self.prepared, self.timeline.part()
        progress = None if prepared is None else prepared.progress
        return {
            "id": self.request_id,
            "object": "request",
            "response_id": None if prepared is None else prepared.id,
            "status": self.status,
            "part": None if part is None else part.value,
            "path": self.path,
            "model": self.model,
            "stream": self.stream,
            "tenant": self.owner.tenant,
            "band": self.owner.band.name.lower(),
            "service_tier": tier_of(self.owner.band),
            "created": int(self.arrival_unix_s),
            "http_status": self.http_status,
            "error_code": self.error_code,
            "num_sequences": None if prepared is None else len(prepared.requests),
            "prompt_tokens": None if progress is None else progress.prompt_tokens,
            "completion_tokens": None if progress is None else progress.completion_tokens,
            "finish_reasons": [] if progress is None else progress.finish_reasons,
            "replica_id": None if progress is None else progress.replica_id,
            "metrics": request_metrics(self.timeline, now),
        }
