"""Chat and text completions without HTTP: a request body becomes a running generation and its reply."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicas.protocol import GenerateRequest, ModelCard, TokenDelta, merge
from router.dispatch import Dispatcher
from router.types import Headroom
from serve_app.openai.known_model import KnownModel
from serve_app.openai.reply.chat import ChatFormat
from serve_app.openai.reply.completion import CompletionFormat
from serve_app.openai.reply.fan_in import Deltas, read_together
from serve_app.openai.reply.format import JsonObject, Progress, ReplyFormat, ReplyHead, fingerprint_of
from serve_app.openai.request.limits import check_at_most, check_counts, check_model
from serve_app.openai.request.priority import tier_of
from serve_app.openai.request.schema import ChatBody, CompletionBody, EncodedPrompt, GenerationBody
from serve_app.openai.request.settings import RequestLimits
from serve_app.openai.request.validation import Caller, chat_requests, completion_requests, refuse_unusable_prompts
from serve_app.openai.tokenize.prompt_tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """Valid request that is ready to start, with the format of its reply."""

    id: str
    """Id of the reply."""
    body: GenerationBody
    requests: tuple[GenerateRequest, ...]
    format: ReplyFormat
    progress: Progress


class CompletionService:
    """Service that turns bodies into generations, starts them and builds the replies that are not streamed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: KnownModel,
        tokenizer: PromptTokenizer,
        limits: RequestLimits,
        rng: random.Random,
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._rng = rng

    def check_chat(self, body: ChatBody) -> None:
        """Check a chat body as far as possible without rendering or tokenizing it.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        check_model(body.model, self._model.name)
        check_counts(body, 1, self._limits)
        check_at_most("top_logprobs", body.top_logprobs or 0, self._limits.max_logprobs)

    def check_completion(self, body: CompletionBody) -> None:
        """Check the body of a text completion as far as possible without tokenizing it.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        check_model(body.model, self._model.name)
        check_counts(body, len(body.prompt), self._limits)
        check_at_most("logprobs", body.logprobs or 0, self._limits.max_logprobs)

    async def chat(self, body: ChatBody, caller: Caller) -> PreparedCompletion:
        """Prepare a chat completion: render, tokenize and validate its messages.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: the body cannot be served.
        """
        self.check_chat(body)
        card = await self._model.card()
        prompt = await self._tokenizer.encode_chat(body.messages, max_prompt_tokens=card.max_model_len)
        caller = replace(caller, request_id=f"chatcmpl-{caller.request_id}")
        requests = chat_requests(body, prompt, caller, card, self._rng)
        head = self._head(caller, card, requests)
        reply_format = ChatFormat(head, body, prompt.token_ids, self._tokenizer.token_text)
        return PreparedCompletion(head.id, body, requests, reply_format, Progress([len(prompt.token_ids)], body.n))

    async def completion(self, body: CompletionBody, caller: Caller) -> PreparedCompletion:
        """Prepare a text completion of one or several prompts.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: the body cannot be served.
        """
        self.check_completion(body)
        card = await self._model.card()
        refuse_unusable_prompts(body.prompt, card)
        prompts = await self._tokenizer.encode_prompts(body.prompt, max_prompt_tokens=card.max_model_len)
        caller = replace(caller, request_id=f"cmpl-{caller.request_id}")
        requests = completion_requests(body, prompts, caller, card, self._rng)
        if body.echo:
            prompts = [await self._with_text(prompt) for prompt in prompts]
        head = self._head(caller, card, requests)
        reply_format = CompletionFormat(head, body, prompts, self._tokenizer.token_text)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        return PreparedCompletion(head.id, body, requests, reply_format, Progress(lengths, body.n))

    def headroom(self, prepared: PreparedCompletion) -> Headroom:
        """Return the room that flow control has left in the completion's band."""
        return self._dispatcher.headroom(prepared.requests[0].band)

    def start(self, prepared: PreparedCompletion) -> Deltas:
        """Start all sequences and return their deltas; leaving the context aborts the unfinished sequences."""
        return read_together(self._dispatcher.start(prepared.requests))

    async def answer(self, prepared: PreparedCompletion) -> JsonObject:
        """Run the completion and return its whole reply; cancelling the call aborts the sequences.

        Raises:
            ServingError: a sequence failed. The first failure is raised and the other sequences are aborted.
        """
        deltas: Sequence[list[TokenDelta]] = [[] for _ in prepared.requests]
        async with self.start(prepared) as arriving:
            async for item in arriving:
                prepared.progress.add(item)
                deltas[item.index].append(item.delta)
        return prepared.format.full_reply([merge(parts) for parts in deltas], prepared.progress.usage())

    async def _with_text(self, prompt: EncodedPrompt) -> EncodedPrompt:
        if prompt.text is not None:
            return prompt
        return replace(prompt, text=await self._tokenizer.decode(prompt.token_ids, skip_special_tokens=True))

    def _head(self, caller: Caller, card: ModelCard, requests: Sequence[GenerateRequest]) -> ReplyHead:
        return ReplyHead(
            id=caller.request_id,
            created=int(caller.arrival_unix_s),
            model=self._model.name,
            system_fingerprint=fingerprint_of(card),
            service_tier=tier_of(requests[0].band),
        )
