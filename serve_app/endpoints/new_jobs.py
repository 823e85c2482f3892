"""Conversion of a request's body into a new job."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.errors import InvalidRequest
from serve_app.endpoints.submitter import Submitter
from serve_app.jobs.api.records import BatchKind, NewBatch, NewLine
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.ignored_fields import CHAT_IGNORED, COMPLETION_IGNORED
from serve_app.openai.request.job_schema import MAX_WINDOW_S, JobOptions
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.priority import background_band_of
from serve_app.openai.request.schema import ChatBody, CompletionBody, GenerationBody
from serve_app.openai.service import CompletionService

CHAT_ENDPOINT, COMPLETION_ENDPOINT = "/v1/chat/completions", "/v1/completions"

SHORT_FORM_MAX_TOKENS = 50
"""Default of `max_tokens` for a prompt sent to /generate."""

_OF_THE_BATCH = frozenset({"callback_url", "deadline_ms", "priority", "service_tier", "stream", "stream_options"})
"""Fields about the execution of a job, stored with its batch; the line holds only the request."""


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Factory of jobs, which are batches of one line; errors that only tokenizing finds fail the job later."""

    service: CompletionService
    model_name: str

    def job(self, submitter: Submitter, fields: JsonObject) -> NewBatch:
        """Return the job for a body of POST /v1/jobs.

        Raises:
            InvalidRequest, UnknownModel: the body is invalid.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        options = parse_body(JobOptions, {name: given[name] for name in JobOptions.model_fields if name in given}, {})
        endpoint, body = self._checked({name: given[name] for name in given if name not in JobOptions.model_fields})
        return NewBatch(
            kind=BatchKind.JOB,
            tenant=submitter.principal.tenant,
            endpoint=endpoint,
            band=background_band_of(body, submitter.hints, submitter.principal),
            band_ceiling=submitter.principal.band_ceiling,
            window_s=window_of(body),
            lines=(NewLine("0", line_of(given)),),
            callback_url=options.callback_url,
            idempotency_key=submitter.idempotency_key,
            body_digest=submitter.digest(fields),
            request_id=submitter.request_id,
        )

    def short_job(self, submitter: Submitter, fields: JsonObject) -> NewBatch:
        """Return the job for a body of POST /generate, where `model` and a prompt's `max_tokens` have defaults.

        Raises:
            InvalidRequest, UnknownModel: the body is invalid.
        """
        defaults: JsonObject = {"model": self.model_name}
        if fields.get("prompt") is not None:
            defaults["max_tokens"] = SHORT_FORM_MAX_TOKENS
        return self.job(submitter, defaults | {name: value for name, value in fields.items() if value is not None})

    def _checked(self, fields: JsonObject) -> tuple[str, GenerationBody]:
        """Return the endpoint for a body, and the body parsed with that endpoint's schema."""
        if "messages" in fields and "prompt" in fields:
            raise InvalidRequest("`prompt` and `messages` are both given; a job has one of them", "prompt")
        body: ChatBody | CompletionBody
        if "messages" in fields:
            body, endpoint = parse_body(ChatBody, fields, CHAT_IGNORED), CHAT_ENDPOINT
            self.service.check_chat(body)
        elif "prompt" in fields:
            body, endpoint = parse_body(CompletionBody, fields, COMPLETION_IGNORED), COMPLETION_ENDPOINT
            self.service.check_completion(body)
        else:
            raise InvalidRequest("`messages` or else `prompt` must be given", "messages", "missing_required_parameter")
        if body.stream:
            raise InvalidRequest("`stream` is true; a job is not streamed", "stream")
        return endpoint, body


def window_of(body: GenerationBody) -> float | None:
    """Return the completion window of asynchronous work, seconds from its submission; None: no limit.

    Raises:
        InvalidRequest: `deadline_ms` is longer than the longest window.
    """
    if body.deadline_ms is None:
        return None
    if body.deadline_ms > MAX_WINDOW_S * 1000:
        message = f"`deadline_ms` is {body.deadline_ms}; at most {MAX_WINDOW_S * 1000} (30 days) is accepted"
        raise InvalidRequest(message, "deadline_ms")
    return body.deadline_ms / 1000


def line_of(fields: JsonObject) -> JsonObject:
    """Return the request without the fields about its execution."""
    return {name: value for name, value in fields.items() if name not in _OF_THE_BATCH}
