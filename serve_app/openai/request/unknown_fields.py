"""Unknown fields of request bodies: no API of this server has their names. They are ignored and named in the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from serve_app.openai.request.body import IgnoredValues, is_among
from serve_app.openai.request.conversation import MESSAGE_IGNORED, ChatMessage, RefusalPart, TextPart
from serve_app.openai.request.job_schema import BatchBody, JobOptions, PromptBatchOptions
from serve_app.openai.request.pooled_schema import (
    POOLED_IGNORED,
    EmbeddingBody,
    RankedDocument,
    RerankBody,
    ScoreBody,
)
from serve_app.openai.request.schema import (
    CHAT_IGNORED,
    COMPLETION_IGNORED,
    TOKENIZE_IGNORED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from serve_app.openai.request.tools import CalledFunction, FunctionObject, FunctionTool, ToolCall

REPLACED = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}
"""Fields that vLLM had, and those that took their place."""

_CHANGING = (
    "custom_logit_processor", "custom_params", "dry_multiplier", "dynatemp_range", "ebnf", "enable_thinking",
    "extra_body", "grammar", "guided_decoding_backend", "guided_whitespace_pattern", "json_schema",
    "kv_transfer_params", "lora", "lora_path", "mirostat", "n_predict", "plugins", "reasoning", "regex",
    "repeat_penalty", "repetition_detection", "return_hidden_states", "samplers", "session_params", "stop_regex",
    "stop_sequences", "system", "tfs_z", "thinking", "thinking_budget", "thinking_token_budget", "top_a",
    "top_n_sigma", "typical_p", "vllm_xargs", "xtc_probability",
)  # fmt: skip
"""Fields of other servers that would change the answer; they are refused."""

_MAX_CHARS = 1000
"""Most characters of the names of one request's ignored fields, with the commas between them."""
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class Level:
    """Kind of object in a body."""

    names: frozenset[str]
    """Fields that are known there, if only to be refused."""
    no_effect: IgnoredValues
    """Known fields, with the values that are accepted and have no effect."""
    inner: Mapping[str, Level]
    """Fields with an object or a list of objects, whose unknown fields are ignored, too."""


def level_of(
    *schemas: type[BaseModel], no_effect: IgnoredValues | None = None, without: Sequence[str] = (), **inner: Level
) -> Level:
    """Return the level with the fields of schemas; `inner` are its fields that hold objects.

    Fields in `without` are accepted and have no effect, so that they are named as unknown ones are.
    """
    names = {
        field.alias or name for schema in schemas for name, field in schema.model_fields.items() if name not in without
    }
    return Level(frozenset({*names, *(no_effect or {})}), no_effect or {}, inner)


_MESSAGE = level_of(
    ChatMessage,
    no_effect=MESSAGE_IGNORED,
    content=level_of(TextPart, RefusalPart),
    tool_calls=level_of(ToolCall, function=level_of(CalledFunction)),
)
_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, BatchBody, JobOptions, PromptBatchOptions)
_POOLED_BODIES = (EmbeddingBody, ScoreBody, RerankBody)
CHAT_LEVEL = level_of(
    *_BODIES,
    no_effect={
        **dict.fromkeys((*REPLACED, *_CHANGING), ()),
        **TOKENIZE_IGNORED,
        **COMPLETION_IGNORED,
        **CHAT_IGNORED,
    },
    messages=_MESSAGE,
    tools=level_of(FunctionTool, function=level_of(FunctionObject)),
)
"""Bodies of this server's own endpoints, all of whose fields are known to each: one that has none refuses it."""
POOLED_LEVEL = level_of(*_POOLED_BODIES, no_effect=POOLED_IGNORED, documents=level_of(RankedDocument))
"""Bodies whose outputs are pooled."""
JOB_LEVEL = Level(
    CHAT_LEVEL.names | POOLED_LEVEL.names, {**POOLED_LEVEL.no_effect, **CHAT_LEVEL.no_effect}, CHAT_LEVEL.inner
)
"""Bodies of jobs, which are for one of these endpoints."""
OPEN_SCHEMAS = (
    *_BODIES, *_POOLED_BODIES, RankedDocument, ChatMessage, TextPart, RefusalPart, ToolCall, CalledFunction,
    FunctionTool, FunctionObject,
)  # fmt: skip
"""Schemas of the objects in which unknown fields are ignored."""


@dataclass(slots=True)
class IgnoredFields:
    """Names of the fields of one request that have no effect, such as `messages.0.cache_control`, percent-encoded."""

    names: list[str] = field(default_factory=list)
    """Names in the order of the body; the last one is `...` if there are more than there is room for."""
    _num_chars: int = 0

    def known_fields(self, fields: Mapping[str, object], level: Level = CHAT_LEVEL) -> dict[str, Any]:
        """Return a body without its unknown fields and without nulls, and note the fields that have no effect.

        A field that another endpoint has stays, and is refused by the schema. A field that asks for nothing, such as an
        empty list, is not noted, unless it is unknown.
        """
        return self._known(fields, level, "")

    def _known(self, fields: Mapping[str, object], level: Level, place: str) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None:
                continue
            if name not in level.names:
                self._note(place, name)
                continue
            if value and is_among(value, level.no_effect.get(name, ())):
                self._note(place, name)
            inner = level.inner.get(name)
            known[name] = value if inner is None else self._known_value(value, inner, f"{place}{name}.")
        return known

    def _known_value(self, value: object, level: Level, place: str) -> object:
        if isinstance(value, dict):
            return self._known(value, level, place)
        if isinstance(value, list):
            return [
                self._known(item, level, f"{place}{index}.") if isinstance(item, dict) else item
                for index, item in enumerate(value)
            ]
        return value

    def _note(self, place: str, name: str) -> None:
        if self._num_chars >= _MAX_CHARS:
            return
        text = place + quote(name[:_MAX_NAME_CHARS], safe="")
        self._num_chars += len(text) + len(", ")
        self.names.append(text)
        if self._num_chars >= _MAX_CHARS:
            self.names[-1] = "..."
