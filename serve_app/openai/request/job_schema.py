"""Schemas of the bodies and queries of files, batches and jobs: names, types and fixed bounds."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from serve_app.openai.request.body import INVALID, StrictBody

MAX_WINDOW_S = 30 * 86_400
"""Longest completion window, seconds."""

MAX_WAIT_S = 60.0
"""Longest wait of a poll, seconds; clients and proxies give up on a silent connection not much later."""

_SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
_ID = "[A-Za-z0-9_-]{1,64}"
_MAX_METADATA_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/rerank", "/v1/responses",
    "/v1/score",
]  # fmt: skip

UploadPurpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]


def _window_s(text: object) -> float:
    window = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    if window is None:
        raise PydanticCustomError(INVALID, "must be a duration such as 24h, 30m or 90s")
    window_s = int(window[1]) * _SECONDS_OF_UNIT[window[2]]
    if window_s > MAX_WINDOW_S:
        raise PydanticCustomError(INVALID, "must be at most {limit} s", {"limit": MAX_WINDOW_S})
    return float(window_s)


def _web_address(url: str) -> str:
    """Return `url` if it has the form of a callback URL; `WebhookGuard` decides if its host may be called."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or any(char <= " " for char in url):
        raise PydanticCustomError(INVALID, "must be an http or https URL with a host")
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError(INVALID, "must not hold a user name or password")
    return url


def _small_metadata(pairs: dict[str, str]) -> dict[str, str]:
    if len(pairs) > _MAX_METADATA_PAIRS:
        message = "has {num_pairs} pairs; at most {limit} are accepted"
        raise PydanticCustomError(INVALID, message, {"num_pairs": len(pairs), "limit": _MAX_METADATA_PAIRS})
    for key, value in pairs.items():
        for what, text, limit in (("key", key, _MAX_KEY_CHARS), ("value", value, _MAX_VALUE_CHARS)):
            if len(text) > limit:
                message = "has a {what} of {num_chars} characters; at most {limit} are accepted"
                raise PydanticCustomError(INVALID, message, {"what": what, "num_chars": len(text), "limit": limit})
    return pairs


def _id(text: str) -> str:
    if not re.fullmatch(_ID, text):
        raise PydanticCustomError(INVALID, "must be 1 to 64 characters: letters, digits, `_` and `-`")
    return text


Id = Annotated[str, AfterValidator(_id), Field(json_schema_extra={"pattern": f"^{_ID}$"})]
"""Id of a file or batch. The purpose in a query of files has the same form."""
CallbackUrl = Annotated[str, Field(max_length=2048), AfterValidator(_web_address)]
Metadata = Annotated[dict[str, str], AfterValidator(_small_metadata)]
CompletionWindow = Annotated[
    float, BeforeValidator(_window_s, json_schema_input_type=Annotated[str, Field(pattern=f"^{_WINDOW.pattern}$")])
]
"""Completion window, seconds; in the body a number with a unit, such as `24h`."""


class ExpiresAfter(StrictBody):
    """Time for which a file is kept after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(strict=False, ge=3600, le=2_592_000)]
    """Seconds from 1 hour to 30 days. Not strict, since a form sends numbers as text."""


class BatchBody(StrictBody):
    """Body of POST /v1/batches."""

    input_file_id: Id
    endpoint: BatchEndpoint
    completion_window: CompletionWindow
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    callback_url: CallbackUrl | None = None
    """Headway's own field: URL that receives a webhook."""


class UploadForm(StrictBody):
    """Form fields of a file upload."""

    purpose: UploadPurpose
    expires_after: ExpiresAfter | None = None


class JobOptions(StrictBody):
    """Fields of a job's body in addition to its endpoint's fields."""

    callback_url: CallbackUrl | None = None


class PromptBatchOptions(StrictBody):
    """Fields of a prompt batch's body in addition to the fields that all its prompts share."""

    prompts: Annotated[list[Any], Field(min_length=1)]
    """Prompts, each checked by itself, so that an invalid one does not fail the others."""
    stream: bool = False
    callback_url: CallbackUrl | None = None


class Query(BaseModel):
    """Base of the queries: numbers arrive as text, and unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class BatchListQuery(Query):
    """Page of a list of batches."""

    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)


class FileListQuery(Query):
    """Page of a list of files."""

    after: Id | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: Id | None = None


class ItemListQuery(Query):
    """Page of a list of stored items."""

    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ResponseQuery(Query):
    """Form in which a stored response is shown."""

    stream: bool = False
    """True for the events of a response that was created with `background` and `stream`."""
    starting_after: int = Field(-1, ge=-1, le=2**31)
    """Sequence number of the last event that the client has."""
    include_obfuscation: bool = False
    """Accepted, without effect."""


class WaitQuery(Query):
    """Longest wait of a poll for the end of a job, seconds."""

    wait: float = Field(0.0, ge=0, le=MAX_WAIT_S)


def _day(text: object) -> date:
    try:
        if isinstance(text, str) and _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise PydanticCustomError(INVALID, "must be a day such as 2026-01-31")


Day = Annotated[date, PlainValidator(_day, json_schema_input_type=date)]


class UsageListQuery(Query):
    """Usage of the server in a range of days, which are days in UTC."""

    start_date: Day | None = None
    """First day. Without it, the day 30 days before the last."""
    end_date: Day | None = None
    """Last day, which is in the answer. Without it, today."""
    tenant: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Tenant; another tenant than the key's own needs an operator's key."""
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    format: Literal["json", "csv"] = "json"


class EngineQuery(Query):
    """Engine whose metrics are shown alone."""

    engine: int | None = Field(None, ge=0)
    """Index of the engine among those that answer, ordered by id. Without it more than 32 engines are summed, as
    `engine="all"`."""


class StreamQuery(Query):
    """Option to stream the outputs of a prompt batch."""

    stream: bool = False


class OutputsQuery(Query):
    """Page of the outputs of a prompt batch."""

    after: int = Field(-1, ge=-1, le=2**31)
    """Index of the last output that the client already has."""
    limit: int = Field(1000, ge=1, le=1000)
