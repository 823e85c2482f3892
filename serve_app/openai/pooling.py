"""Requests for pooled outputs: bodies become valid requests for embeddings and scores, with the formats of replies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from replicas.errors import InvalidRequest
from replicas.protocol import ModelCard, PoolCard, PoolParams, PoolTask, SamplingParams
from router.timeline import Timeline
from serve_app.openai.reply.format import Progress
from serve_app.openai.reply.pooled_format import EmbeddingFormat, PooledFormat, PooledHead, RerankFormat, ScoreFormat
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.pooled_schema import EmbeddingBody, PooledBody, RerankBody, ScoreBody
from serve_app.openai.request.schema import EncodedPrompt, Prompt
from serve_app.openai.request.validation import (
    RequestLimits,
    Truncation,
    check_at_most,
    check_tokens,
    prompt_too_long,
    sequence_requests,
)
from serve_app.openai.tokenize.prompt_tokenizer import PromptTokenizer

_INPUT_TYPES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts that stand for the values of `input_type`; each other value stands for itself."""


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """Facts about a model with a pooling, for one request."""

    card: ModelCard
    pool: PoolCard

    @classmethod
    def of(cls, card: ModelCard, task: PoolTask) -> PoolingModel:
        """Return the facts of a model that has this task.

        Raises:
            InvalidRequest: it has another one, or none.
        """
        if card.pool is None:
            raise InvalidRequest("this model generates; it has no pooling", "model")
        if card.pool.task is not task:
            made, asked = ("embeddings", "scores") if task is PoolTask.SCORE else ("scores", "embeddings")
            raise InvalidRequest(f"this model makes {made}, and no {asked}", "model")
        return cls(card, card.pool)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text."""
        return min(self.card.max_model_len, self.pool.max_tokens or self.card.max_model_len)

    def truncation_of(self, body: PooledBody) -> Truncation | None:
        """Return the tokens that a body keeps of a longer text; None: such a text is refused.

        Raises:
            InvalidRequest: the body keeps more tokens than the model takes.
        """
        limit = body.truncate_prompt_tokens
        if limit is None:
            return None
        check_at_most("truncate_prompt_tokens", limit, self.max_tokens)
        num_tokens = self.max_tokens if limit == -1 else limit
        return Truncation(num_tokens, keeps_end=body.truncation_side == "left", keeps_special=True)

    def params(self, dimensions: int | None) -> SamplingParams:
        """Return the parameters of a request whose output has `dimensions` numbers; None: all.

        Raises:
            InvalidRequest: the model has no shorter outputs, or none of that length.
        """
        self._check_dimensions(dimensions)
        shorter = dimensions if dimensions is not None and dimensions < self.pool.num_outputs else None
        return SamplingParams(max_tokens=0, pool=PoolParams(self.pool.task, self.pool.pooling, shorter))

    def _check_dimensions(self, dimensions: int | None) -> None:
        num_outputs = self.pool.num_outputs
        if dimensions is None or dimensions == num_outputs:
            return
        if not self.pool.can_shorten:
            message = (
                f"`dimensions` is {dimensions}; this model's embeddings have {num_outputs} and cannot be shortened"
            )
            raise InvalidRequest(message, "dimensions")
        check_at_most("dimensions", dimensions, num_outputs)
        if self.pool.dimensions and dimensions not in self.pool.dimensions:
            listed = ", ".join(map(str, self.pool.dimensions))
            raise InvalidRequest(f"`dimensions` is {dimensions}; it must be one of {listed}", "dimensions")


class PooledRequests:
    """Maker of requests for pooled outputs from their bodies."""

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: PromptTokenizer,
        limits: RequestLimits,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """`names` are those of the model, the first of which is in replies."""
        self._names = names
        self._tokenizer = tokenizer
        self._limits = limits
        self._clock = clock
        self._rng = rng

    async def embeddings(self, body: EmbeddingBody, caller: Caller, card: ModelCard) -> PreparedCompletion:
        """Prepare embeddings of texts.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        model = PoolingModel.of(card, PoolTask.EMBED)
        params, truncation = model.params(body.dimensions), model.truncation_of(body)
        inputs = _with_prompt(body, model.pool)
        prompts = await self._tokenizer.encode_prompts(
            inputs,
            max_prompt_tokens=None if truncation is not None else model.max_tokens,
            truncation=truncation,
            field="input",
            owner=caller.owner_of(body),
        )
        caller = replace(caller, request_id=f"embd-{caller.request_id}")
        reply = EmbeddingFormat(self._head(caller), body)
        return self._prepared(body, caller, model, prompts, params, reply)

    async def scores(self, body: ScoreBody, caller: Caller, card: ModelCard) -> PreparedCompletion:
        """Prepare the scores of pairs of texts.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        caller = replace(caller, request_id=f"score-{caller.request_id}")
        return await self._scored(body, caller, card, ScoreFormat(self._head(caller)))

    async def ranks(self, body: RerankBody, caller: Caller, card: ModelCard) -> PreparedCompletion:
        """Prepare the ranks of documents for a query.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        caller = replace(caller, request_id=f"rerank-{caller.request_id}")
        return await self._scored(body, caller, card, RerankFormat(self._head(caller), body))

    async def _scored(
        self, body: ScoreBody | RerankBody, caller: Caller, card: ModelCard, reply: PooledFormat
    ) -> PreparedCompletion:
        model = PoolingModel.of(card, PoolTask.SCORE)
        truncation = model.truncation_of(body)
        prompts = await self._tokenizer.encode_pairs(
            body.pairs, max_prompt_tokens=model.max_tokens, truncation=truncation, owner=caller.owner_of(body)
        )
        return self._prepared(body, caller, model, prompts, model.params(None), reply)

    def _prepared(
        self,
        body: PooledBody,
        caller: Caller,
        model: PoolingModel,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        reply: PooledFormat,
    ) -> PreparedCompletion:
        field = body.texts_field
        salt = self._limits.cache_salt(caller.principal.tenant, body.cache_salt)
        requests = sequence_requests(body, prompts, [params] * len(prompts), caller, self._rng, salt)
        for prompt in prompts:
            if not prompt.token_ids:
                raise InvalidRequest(f"`{field}` has a text without tokens", field)
            if len(prompt.token_ids) > model.max_tokens:
                raise prompt_too_long(len(prompt.token_ids), model.max_tokens, field)
        check_tokens(requests, model.card, field, self._tokenizer.token_of)
        past = caller.timeline or Timeline(self._clock())
        return PreparedCompletion(
            id=caller.request_id,
            model=self._names[0],
            account=caller.principal.tenant,
            body=body,
            requests=requests,
            format=reply,
            progress=Progress([len(prompt.token_ids) for prompt in prompts], 1),
            timelines=tuple(past.fork() for _ in requests),
        )

    def _head(self, caller: Caller) -> PooledHead:
        return PooledHead(caller.request_id, int(caller.arrival_unix_s), self._names[0])


def _with_prompt(body: EmbeddingBody, pool: PoolCard) -> list[Prompt]:
    """Return the inputs behind the model's prompt that the body names, or its default one.

    Raises:
        InvalidRequest: the model has no such prompt, or an input has token ids.
    """
    prompts = dict(pool.prompts)
    field = "prompt_name" if body.prompt_name is not None else "input_type"
    name = body.prompt_name if body.prompt_name is not None else body.input_type
    if name is None:
        text = prompts.get(pool.default_prompt or "", "")
        return [text + item if isinstance(item, str) else item for item in body.input]
    names = (name,) if field == "prompt_name" else _INPUT_TYPES.get(name, (name,))
    found = next((each for each in names if each in prompts), None)
    if found is None and (prompts or field == "prompt_name"):
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"`{field}` is `{name[:64]}`; the model's prompts are: {known}", field)
    if not all(isinstance(item, str) for item in body.input):
        raise InvalidRequest(f"`{field}` is for texts; `input` has token ids", field)
    return [prompts.get(found or "", "") + str(item) for item in body.input]
