"""Conversion of request bodies into new jobs and prompt batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic_core import to_json

from replicas.errors import InvalidRequest
from serve_app.endpoints.jobs.job_requests import Submitter
from serve_app.jobs.api.new_lines import NewLine, NewLines
from serve_app.jobs.api.records import BatchKind, JobsSettings, NewBatch
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.body import IgnoredValues
from serve_app.openai.request.job_schema import MAX_WINDOW_S, JobOptions, PromptBatchOptions
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.pooled_schema import POOLED_IGNORED, AnyBody, EmbeddingBody, RerankBody, ScoreBody
from serve_app.openai.request.schema import CHAT_IGNORED, COMPLETION_IGNORED, ChatBody, CompletionBody, GenerationBody
from serve_app.openai.request.validation import BodyChecks
from serve_app.reference.operations import Fields

_COMPLETION_ENDPOINT = "/v1/completions"

_SHORT_FORM_MAX_TOKENS = 50
"""Default of `max_tokens` for a prompt sent to /generate."""

_BATCH_FIELDS = frozenset({"callback_url", "deadline_ms", "priority", "service_tier", "stream", "stream_options"})
"""Fields about the execution of a job, stored with its batch; the line holds only the request."""

_PLACEHOLDER_PROMPT = "a"
"""Prompt for checking the fields that all prompts share."""

_WINDOW_LIMIT: JsonObject = {"deadline_ms": {"maximum": MAX_WINDOW_S * 1000}}
_JOB_LIMITS: JsonObject = {"stream": {"const": False}, **_WINDOW_LIMIT}
JobBody = ChatBody | CompletionBody | EmbeddingBody | ScoreBody | RerankBody
_ENDPOINTS: Mapping[str, tuple[str, type[JobBody], IgnoredValues]] = {
    "messages": ("/v1/chat/completions", ChatBody, CHAT_IGNORED),
    "prompt": (_COMPLETION_ENDPOINT, CompletionBody, COMPLETION_IGNORED),
    "input": ("/v1/embeddings", EmbeddingBody, POOLED_IGNORED),
    "text_1": ("/v1/score", ScoreBody, POOLED_IGNORED),
    "query": ("/v1/rerank", RerankBody, POOLED_IGNORED),
}
"""Endpoint of a job, its schema, and the fields without effect, by the field that its bodies alone have."""
JOB_BODIES = tuple(
    Fields(
        schema,
        ignored,
        schema.__name__.replace("Body", "JobBody"),
        JobOptions,
        limited=_JOB_LIMITS if issubclass(schema, GenerationBody) else _WINDOW_LIMIT,
    )
    for _, schema, ignored in _ENDPOINTS.values()
)
SHORT_JOB_BODIES = tuple(replace(body, title=f"Short{body.title}", optional=("model",)) for body in JOB_BODIES)
PROMPT_BATCH_BODY = Fields(
    CompletionBody,
    {**COMPLETION_IGNORED, "prompt": ()},
    "PromptBatchBody",
    PromptBatchOptions,
    dropped=("prompt",),
    optional=("model",),
    limited={**_JOB_LIMITS, "n": {"const": 1}},
)
SYNC_PROMPTS_BODY = replace(
    PROMPT_BATCH_BODY,
    title="SyncPromptsBody",
    ignored={**PROMPT_BATCH_BODY.ignored, "callback_url": ()},
    dropped=("prompt", "callback_url"),
    limited={"n": {"const": 1}},
)


@dataclass(frozen=True, slots=True)
class NewJob:
    """Job to be submitted: a batch of one line."""

    batch: NewBatch
    body: JobBody


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Factory of jobs; another process can do its work."""

    checks: BodyChecks
    model_name: str

    def job(self, submitter: Submitter, fields: JsonObject) -> NewJob:
        """Return the job for a body of POST /v1/jobs.

        Raises:
            InvalidRequest, UnknownModel: the body is invalid.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        options = parse_body(JobOptions, {name: given[name] for name in JobOptions.model_fields if name in given}, {})
        endpoint, body = self._checked({name: given[name] for name in given if name not in JobOptions.model_fields})
        batch = NewBatch(
            kind=BatchKind.JOB,
            tenant=submitter.caller.principal.tenant,
            endpoint=endpoint,
            band=submitter.caller.background_band_of(body),
            band_ceiling=submitter.caller.principal.band_ceiling,
            window_s=_window_of(body),
            lines=NewLines([NewLine("0", _line_of(given))]),
            callback_url=options.callback_url,
            idempotency_key=submitter.idempotency_key,
            body_digest=submitter.digest(fields),
            request_id=submitter.request_id,
            trace=submitter.trace,
        )
        return NewJob(batch, body)

    def short_job(self, submitter: Submitter, fields: JsonObject) -> NewJob:
        """Return the job for a body of POST /generate, where `model` and a prompt's `max_tokens` have defaults.

        Raises:
            InvalidRequest, UnknownModel: the body is invalid.
        """
        defaults: JsonObject = {"model": self.model_name}
        if fields.get("prompt") is not None:
            defaults["max_tokens"] = _SHORT_FORM_MAX_TOKENS
        return self.job(submitter, defaults | {name: value for name, value in fields.items() if value is not None})

    def _checked(self, fields: JsonObject) -> tuple[str, JobBody]:
        """Return the endpoint for a body, and the body parsed with that endpoint's schema."""
        given = [name for name in _ENDPOINTS if name in fields]
        if len(given) > 1:
            raise InvalidRequest(f"`{given[1]}` and `{given[0]}` are both given; a job has one of them", given[1])
        if not given:
            named = ", ".join(f"`{name}`" for name in _ENDPOINTS)
            raise InvalidRequest(f"one of {named} must be given", "messages", "missing_required_parameter")
        endpoint, schema, ignored = _ENDPOINTS[given[0]]
        body = parse_body(schema, fields, ignored)
        match body:
            case ChatBody():
                self.checks.check_chat(body)
            case CompletionBody():
                self.checks.check_completion(body)
            case _:
                self.checks.check_pooled(body)
        if body.stream:
            raise InvalidRequest("`stream` is true; a job is not streamed", "stream")
        return endpoint, body


@dataclass(frozen=True, slots=True)
class SyncPrompts:
    """Prompt batch that is answered at once."""

    bodies: Sequence[CompletionBody | InvalidRequest]
    """Completion body, or the error, of each prompt in order."""
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class PromptBatchMaker:
    """Factory of prompt batches; an invalid prompt fails alone. Another process can do its work."""

    checks: BodyChecks
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

    def batch(self, limits: JobsSettings, submitter: Submitter, fields: JsonObject) -> NewBatch:
        """Return the batch for a body of POST /v1/batch/async; `max_file_bytes` bounds the size of all its requests.

        Raises:
            InvalidRequest, UnknownModel: the shared fields are invalid, the requests are too large together, or the
                prompts are too many.
        """
        options = self._options(fields, limits.max_batch_lines)
        if options.stream:
            raise InvalidRequest("`stream` is for POST /v1/batch/sync", "stream", "unsupported_parameter")
        shared = self._shared(fields)
        body, request = self._checked(shared), _line_of(shared)
        # Each line repeats the shared fields.
        num_bytes = len(to_json(request)) * len(options.prompts) + len(to_json(options.prompts))
        if num_bytes > limits.max_file_bytes:
            raise InvalidRequest(
                f"the requests have {num_bytes} bytes together; at most {limits.max_file_bytes} are accepted",
                "prompts",
            )
        return NewBatch(
            kind=BatchKind.PROMPTS,
            tenant=submitter.caller.principal.tenant,
            endpoint=_COMPLETION_ENDPOINT,
            band=submitter.caller.background_band_of(body),
            band_ceiling=submitter.caller.principal.band_ceiling,
            window_s=_window_of(body),
            lines=NewLines(
                [
                    NewLine(str(index), request | {"prompt": _alone(prompt)})
                    for index, prompt in enumerate(options.prompts)
                ]
            ),
            callback_url=options.callback_url,
            idempotency_key=submitter.idempotency_key,
            body_digest=submitter.digest(fields),
            request_id=submitter.request_id,
            trace=submitter.trace,
        )

    def _options(self, fields: JsonObject, max_prompts: int) -> PromptBatchOptions:
        if fields.get("prompt") is not None:
            raise InvalidRequest("`prompt` is not supported here; send `prompts`", "prompt", "unsupported_parameter")
        own = {name: fields[name] for name in PromptBatchOptions.model_fields if name in fields}
        options = parse_body(PromptBatchOptions, own, {})
        if len(options.prompts) > max_prompts:
            raise InvalidRequest(
                f"`prompts` has {len(options.prompts)} items; at most {max_prompts} are accepted",
                "prompts",
            )
        return options

    def _shared(self, fields: JsonObject) -> JsonObject:
        """Return the fields that every prompt shares."""
        own = PromptBatchOptions.model_fields
        given = {name: value for name, value in fields.items() if name not in own and value is not None}
        return {"model": self.model_name} | given

    def _checked(self, shared: JsonObject) -> CompletionBody:
        """Return the shared fields as a completion body with a placeholder prompt; raise if they are invalid."""
        body = parse_body(CompletionBody, shared | {"prompt": _PLACEHOLDER_PROMPT}, COMPLETION_IGNORED)
        if body.n > 1:
            raise InvalidRequest(f"`n` is {body.n}; a prompt batch takes 1: repeat the prompt instead", "n")
        self.checks.check_completion(body)
        return body


def _window_of(body: AnyBody) -> float | None:
    """Return the completion window of asynchronous work, seconds from its submission; None: no limit.

    Raises:
        InvalidRequest: `deadline_ms` is longer than the longest window.
    """
    if body.deadline_ms is None:
        return None
    if body.deadline_ms > MAX_WINDOW_S * 1000:
        raise InvalidRequest(
            f"`deadline_ms` is {body.deadline_ms}; at most {MAX_WINDOW_S * 1000} (30 days) is accepted", "deadline_ms"
        )
    return body.deadline_ms / 1000


def _line_of(fields: JsonObject) -> JsonObject:
    """Return the request without the fields about its execution."""
    return {name: value for name, value in fields.items() if name not in _BATCH_FIELDS}


def _body_or_refusal(shared: JsonObject, prompt: object) -> CompletionBody | InvalidRequest:
    try:
        return parse_body(CompletionBody, shared | {"prompt": _alone(prompt)}, COMPLETION_IGNORED)
    except InvalidRequest as error:
        return error


def _alone(prompt: object) -> object:
    """Return one prompt as the `prompt` of a completion: a list is one prompt's token ids, never several prompts."""
    return [prompt] if isinstance(prompt, list) else prompt
