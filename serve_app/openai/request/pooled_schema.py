"""Schemas of the bodies whose outputs are pooled: embeddings as OpenAI has them, scores and ranks as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from serve_app.openai.request.body import CONFLICT, IgnoredValues, NonEmptyText, StrictBody
from serve_app.openai.request.schema import (
    MAX_INT64,
    GenerationBody,
    Prompt,
    PromptInput,
    RequestOptions,
    as_prompts,
    traced_message,
)

POOLED_IGNORED: IgnoredValues = {"add_special_tokens": (True,), "store": (False, True)}


def _as_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[NonEmptyText],
    Field(min_length=1),
    BeforeValidator(
        _as_texts, json_schema_input_type=NonEmptyText | Annotated[list[NonEmptyText], Field(min_length=1)]
    ),
]
"""One text, or several."""


class PooledBody(RequestOptions):
    """Fields that all requests for pooled outputs share."""

    operation: ClassVar[str] = "embeddings"
    stream: ClassVar[bool] = False
    stream_options: ClassVar[None] = None
    n: ClassVar[int] = 1
    seed: ClassVar[None] = None
    texts_field: ClassVar[str]
    """Name of the field with the texts that have an output each."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT64)
    """Tokens of a text that are kept; -1 keeps as many as the model takes. Special tokens count, and stay."""
    truncation_side: Literal["left", "right"] = "right"
    """Side from which `truncate_prompt_tokens` takes the other tokens: the beginning (`left`) or the end."""
    include_metrics: bool = False
    """True if the reply has `metrics`, the parts of the request's time."""

    @model_validator(mode="after")
    def _keeps_some_tokens(self) -> PooledBody:
        if self.truncate_prompt_tokens == 0:
            raise PydanticCustomError(
                CONFLICT, "is 0; it must be at least 1, or -1", {"param": "truncate_prompt_tokens"}
            )
        return self

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Texts as traces have them."""
        raise NotImplementedError

    @property
    def num_texts(self) -> int:
        """Number of texts that have an output each."""
        return len(getattr(self, self.texts_field))


class EmbeddingBody(PooledBody):
    """Body of POST /v1/embeddings."""

    texts_field: ClassVar[str] = "input"

    input: Annotated[list[Prompt], PlainValidator(as_prompts, json_schema_input_type=PromptInput)]
    encoding_format: Literal["float", "base64"] = "float"
    """Form of an embedding: a list of numbers, or base64 of their 4 bytes each."""
    dimensions: int | None = Field(None, ge=1, le=MAX_INT64)
    """Number of the first numbers of an embedding that are kept, if the model allows it."""
    prompt_name: str | None = None
    """Name of the model's prompt that goes before each text."""
    input_type: str | None = None
    """Cohere's name of the same: `query`, or `document`, for which a model may also have `passage` or `corpus`."""

    @model_validator(mode="after")
    def _has_one_prompt_name(self) -> EmbeddingBody:
        if self.prompt_name is not None and self.input_type is not None:
            raise PydanticCustomError(
                CONFLICT, "is given beside `prompt_name`; send one of them", {"param": "input_type"}
            )
        return self

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Texts as traces have them."""
        return [traced_message("user", text) for text in self.input]


class ScoreBody(PooledBody):
    """Body of POST /v1/score, as in vLLM: one text is scored with each of several, or as many with as many."""

    operation: ClassVar[str] = "score"
    texts_field: ClassVar[str] = "text_2"

    text_1: Texts
    """Text, or texts, that the others are scored for: queries."""
    text_2: Texts
    """Texts that are scored: documents."""

    @model_validator(mode="after")
    def _makes_pairs(self) -> ScoreBody:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise PydanticCustomError(
                CONFLICT,
                "has {num_first} texts and `text_2` has {num_second}; it must have 1, or as many",
                {"num_first": len(self.text_1), "num_second": len(self.text_2), "param": "text_1"},
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of texts."""
        queries = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(queries, self.text_2, strict=True))

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Texts as traces have them."""
        return [traced_message("user", text) for text in (*self.text_1, *self.text_2)]


class RankedDocument(StrictBody):
    """Document as an object."""

    text: NonEmptyText


class RerankBody(PooledBody):
    """Body of POST /v1/rerank, as Jina and Cohere have it."""

    operation: ClassVar[str] = "rerank"
    texts_field: ClassVar[str] = "documents"

    query: NonEmptyText
    documents: Annotated[list[NonEmptyText | RankedDocument], Field(min_length=1)]
    top_n: int = Field(0, ge=0, le=MAX_INT64)
    """Number of the best documents that the reply has; 0: all."""
    return_documents: bool = True
    """True if the reply has the texts of the documents."""

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Query with each document."""
        return [(self.query, text) for text in self.texts]

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Texts as traces have them."""
        return [traced_message("user", text) for text in (self.query, *self.texts)]


AnyBody = GenerationBody | PooledBody
"""Body of a request that replicas compute."""
