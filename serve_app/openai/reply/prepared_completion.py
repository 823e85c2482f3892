"""Completions: ready to start, with the format of their replies; and the view of one that runs or has ended."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.protocol import GenerateRequest
from router.timeline import Timeline, slowest_of
from serve_app.openai.reply.format import JsonObject, Progress, ReplyFormat
from serve_app.openai.reply.request_metrics import request_metrics
from serve_app.openai.request.caller import WorkOwner, tier_of
from serve_app.openai.request.pooled_schema import AnyBody

ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "embd-", "score-", "rerank-")
"""Begins of the replies' ids, before the ids of their requests."""


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Options of the parser of a chat's outputs that follow from its prompt and its grammar."""

    starts_in_reasoning: bool
    """True if the prompt ends within the reasoning."""
    whole_calls: bool
    """True if a call is reported when it is complete: no grammar binds it."""


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """Valid request that is ready to start, with the format of its reply."""

    id: str
    """Id of the reply."""
    model: str
    """Name of the model in the reply."""
    account: str
    """Tenant of the API key, to which the work is charged."""
    body: AnyBody
    requests: tuple[GenerateRequest, ...]
    format: ReplyFormat
    progress: Progress
    timelines: tuple[Timeline, ...]
    """Timeline of each request, in their order."""
    not_enforced: tuple[str, ...] = ()
    """JSON pointers to the keywords of the request's JSON Schemas that are not enforced."""
    parser: ParserOptions | None = None
    """Options of the parser; None: the outputs have neither calls nor reasoning."""

    @property
    def timeline(self) -> Timeline:
        """Timeline of the sequence that ended last, or of one that has not ended."""
        return slowest_of(self.timelines)

    @property
    def first_delta_s(self) -> float | None:
        """Arrival of the first delta of any choice, monotonic seconds; None: there is none yet."""
        return min((line.first_delta_s for line in self.timelines if line.first_delta_s is not None), default=None)

    @property
    def longest_outputs(self) -> list[int]:
        """Output tokens of the longest choice of each prompt whose choices have all ended."""
        num_choices = self.body.n
        prompts = (self.timelines[at : at + num_choices] for at in range(0, len(self.timelines), num_choices))
        return [
            max(choice.num_output_tokens for choice in choices)
            for choices in prompts
            if all(choice.finished_s is not None for choice in choices)
        ]

    def usage(self) -> JsonObject:
        """Return OpenAI's usage object."""
        return self.progress.usage() | self.format.usage_details()


@dataclass(frozen=True, slots=True)
class RequestView:
    """View of a completion at one moment, without its text."""

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
