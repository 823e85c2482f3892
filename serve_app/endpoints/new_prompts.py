"""Conversion of a prompt batch's body into one completion for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from replicas.errors import InvalidRequest
from serve_app.endpoints.new_jobs import COMPLETION_ENDPOINT, line_of, window_of
from serve_app.endpoints.submitter import Submitter
from serve_app.jobs.api.records import BatchKind, NewBatch, NewLine
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.ignored_fields import COMPLETION_IGNORED
from serve_app.openai.request.job_schema import PromptBatchOptions
from serve_app.openai.request.limits import grouped
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.priority import background_band_of
from serve_app.openai.request.schema import CompletionBody
from serve_app.openai.service import CompletionService

_STAND_IN = "a"
"""Placeholder prompt for checking the fields that all prompts share."""


@dataclass(frozen=True, slots=True)
class SyncPrompts:
    """Prompt batch that is answered at once."""

    bodies: Sequence[CompletionBody | InvalidRequest]
    """Completion body, or the error, of each prompt in order."""
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class PromptBatchMaker:
    """Parser of prompt batches; an invalid prompt fails alone."""

    service: CompletionService
    model_name: str

    def sync(self, max_prompts: int, fields: JsonObject) -> SyncPrompts:
        """Return the prompts of a body of POST /v1/batch/sync.

        Raises:
            InvalidRequest, UnknownModel: the shared fields are invalid, or the prompts are too many.
        """
        options = self._options(fields, max_prompts)
        if options.callback_url is not None:
            raise InvalidRequest("`callback_url` is for POST /v1/batch/async", "callback_url", "unsupported_parameter")
        shared = self._shared(fields)
        self._checked(shared)
        return SyncPrompts([_body_or_refusal(shared, prompt) for prompt in options.prompts], options.stream)

    def batch(self, submitter: Submitter, max_prompts: int, max_bytes: int, fields: JsonObject) -> NewBatch:
        """Return the batch for a body of POST /v1/batch/async; `max_bytes` bounds the size of all its requests.

        Raises:
            InvalidRequest, UnknownModel: the shared fields are invalid, the requests are too large together, or the
                prompts are too many.
        """
        options = self._options(fields, max_prompts)
        if options.stream:
            raise InvalidRequest("`stream` is for POST /v1/batch/sync", "stream", "unsupported_parameter")
        shared = self._shared(fields)
        body, request = self._checked(shared), line_of(shared)
        # Each line repeats the shared fields.
        num_bytes = len(to_json(request)) * len(options.prompts) + len(to_json(options.prompts))
        if num_bytes > max_bytes:
            message = (
                f"the requests have {grouped(num_bytes)} bytes together; at most {grouped(max_bytes)} are accepted"
            )
            raise InvalidRequest(message, "prompts")
        return NewBatch(
            kind=BatchKind.PROMPTS,
            tenant=submitter.principal.tenant,
            endpoint=COMPLETION_ENDPOINT,
            band=background_band_of(body, submitter.hints, submitter.principal),
            band_ceiling=submitter.principal.band_ceiling,
            window_s=window_of(body),
            lines=tuple(
                NewLine(str(index), request | {"prompt": _alone(prompt)})
                for index, prompt in enumerate(options.prompts)
            ),
            callback_url=options.callback_url,
            idempotency_key=submitter.idempotency_key,
            body_digest=submitter.digest(fields),
            request_id=submitter.request_id,
        )

    def _options(self, fields: JsonObject, max_prompts: int) -> PromptBatchOptions:
        if fields.get("prompt") is not None:
            raise InvalidRequest("`prompt` is not supported here; send `prompts`", "prompt", "unsupported_parameter")
        own = {name: fields[name] for name in PromptBatchOptions.model_fields if name in fields}
        options = parse_body(PromptBatchOptions, own, {})
        if len(options.prompts) > max_prompts:
            message = (
                f"`prompts` has {grouped(len(options.prompts))} items; at most {grouped(max_prompts)} are accepted"
            )
            raise InvalidRequest(message, "prompts")
        return options

    def _shared(self, fields: JsonObject) -> JsonObject:
        """Return the fields that every prompt shares."""
        own = PromptBatchOptions.model_fields
        given = {name: value for name, value in fields.items() if name not in own and value is not None}
        return {"model": self.model_name} | given

    def _checked(self, shared: JsonObject) -> CompletionBody:
        """Return the shared fields as a completion body with a placeholder prompt; raise if they are invalid."""
        body = parse_body(CompletionBody, shared | {"prompt": _STAND_IN}, COMPLETION_IGNORED)
        if body.n > 1:
            raise InvalidRequest(f"`n` is {grouped(body.n)}; a prompt batch takes 1: repeat the prompt instead", "n")
        self.service.check_completion(body)
        return body


def _body_or_refusal(shared: JsonObject, prompt: object) -> CompletionBody | InvalidRequest:
    try:
        return parse_body(CompletionBody, shared | {"prompt": _alone(prompt)}, COMPLETION_IGNORED)
    except InvalidRequest as error:
        return error


def _alone(prompt: object) -> object:
    """Return one prompt as the `prompt` of a completion: a list is one prompt's token ids, never several prompts."""
    return [prompt] if isinstance(prompt, list) else prompt
