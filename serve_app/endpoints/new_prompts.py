"""From the body of a prompt batch to one completion for each prompt."""

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
"""Stands for the prompts while the fields that they share are checked."""


@dataclass(frozen=True, slots=True)
class SyncPrompts:
    """A batch that is answered at once."""

    bodies: Sequence[CompletionBody | InvalidRequest]
    """What to complete, or why that cannot be, prompt by prompt."""
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class PromptBatchMaker:
    """Reads prompt batches; a prompt that is no good is left to fail by itself."""

    service: CompletionService
    model_name: str

    def sync(self, max_prompts: int, fields: JsonObject) -> SyncPrompts:
        """The prompts of a body of POST /v1/batch/sync.

        Raises:
            InvalidRequest, UnknownModel: what the prompts share is no good, or they are too many.
        """
        options = self._options(fields, max_prompts)
        if options.callback_url is not None:
            raise InvalidRequest("`callback_url` is for POST /v1/batch/async", "callback_url", "unsupported_parameter")
        shared = self._shared(fields)
        self._checked(shared)
        return SyncPrompts([_body_or_refusal(shared, prompt) for prompt in options.prompts], options.stream)

    def batch(self, submitter: Submitter, max_prompts: int, max_bytes: int, fields: JsonObject) -> NewBatch:
        """The batch for a body of POST /v1/batch/async; as lines of a file it would have at most `max_bytes`.

        Raises:
            InvalidRequest, UnknownModel: what the prompts share is no good or too much, or they are too many.
        """
        options = self._options(fields, max_prompts)
        if options.stream:
            raise InvalidRequest("`stream` is for POST /v1/batch/sync", "stream", "unsupported_parameter")
        shared = self._shared(fields)
        body, request = self._checked(shared), line_of(shared)
        # Each line has what all share, once more.
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
        """The fields that every prompt gets."""
        own = PromptBatchOptions.model_fields
        given = {name: value for name, value in fields.items() if name not in own and value is not None}
        return {"model": self.model_name} | given

    def _checked(self, shared: JsonObject) -> CompletionBody:
        """What every prompt gets, which must be right whatever the prompt."""
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
    """A prompt as `prompt` of a completion of its own: a list is token ids, never several prompts."""
    return [prompt] if isinstance(prompt, list) else prompt
