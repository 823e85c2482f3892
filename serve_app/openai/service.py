"""Chat and text completions without HTTP: from a body to a running generation and its reply."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicas.protocol import GenerateRequest, ModelCard, TokenDelta, merge
from router.dispatch import Dispatcher
from router.types import Headroom
from serve_app.openai.chat import EncodedPrompt, PromptTokenizer
from serve_app.openai.chat_reply import ChatFormat
from serve_app.openai.completion_reply import CompletionFormat
from serve_app.openai.dispatcher import KnownModel
from serve_app.openai.fan_in import Deltas, read_together
from serve_app.openai.limits import check_at_most, check_counts, check_model
from serve_app.openai.reply import JsonObject, Progress, ReplyFormat, ReplyHead, fingerprint_of
from serve_app.openai.schema import ChatBody, CompletionBody, GenerationBody
from serve_app.openai.settings import RequestLimits
from serve_app.openai.urgency import tier_of
from serve_app.openai.validation import Caller, chat_requests, completion_requests, refuse_unusable_prompts


@dataclass(frozen=True, slots=True)
class Generation:
    """A valid request, ready to be started, and how its reply is written."""

    id: str
    """The id of the reply."""
    body: GenerationBody
    requests: tuple[GenerateRequest, ...]
    format: ReplyFormat
    progress: Progress


class CompletionService:
    """Makes generations of bodies, starts them, and answers those that are not streamed."""

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
        """Refuse what can be seen to be refused before anything is rendered or tokenized.

        Raises:
            InvalidRequest, UnknownModel: it cannot be served.
        """
        check_model(body.model, self._model.name)
        check_counts(body, 1, self._limits)
        check_at_most("top_logprobs", body.top_logprobs or 0, self._limits.max_logprobs)

    def check_completion(self, body: CompletionBody) -> None:
        """The same for a text completion.

        Raises:
            InvalidRequest, UnknownModel: it cannot be served.
        """
        check_model(body.model, self._model.name)
        check_counts(body, len(body.prompt), self._limits)
        check_at_most("logprobs", body.logprobs or 0, self._limits.max_logprobs)

    async def chat(self, body: ChatBody, caller: Caller) -> Generation:
        """A chat completion.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: it cannot be served.
        """
        self.check_chat(body)
        card = await self._model.card()
        prompt = await self._tokenizer.encode_chat(body.messages, max_prompt_tokens=card.max_model_len)
        caller = replace(caller, request_id=f"chatcmpl-{caller.request_id}")
        requests = chat_requests(body, prompt, caller, card, self._rng)
        head = self._head(caller, card, requests)
        reply_format = ChatFormat(head, body, prompt.token_ids, self._tokenizer.token_text)
        return Generation(head.id, body, requests, reply_format, Progress([len(prompt.token_ids)], body.n))

    async def completion(self, body: CompletionBody, caller: Caller) -> Generation:
        """A text completion of one or several prompts.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: it cannot be served.
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
        return Generation(head.id, body, requests, reply_format, Progress(lengths, body.n))

    def headroom(self, generation: Generation) -> Headroom:
        """What may still wait in the band that it runs in."""
        return self._dispatcher.headroom(generation.requests[0].band)

    def start(self, generation: Generation) -> Deltas:
        """The deltas of all its sequences; leaving the context aborts what has not finished."""
        return read_together(self._dispatcher.start(generation.requests))

    async def answer(self, generation: Generation) -> JsonObject:
        """The whole reply; cancelling this aborts the sequences.

        Raises:
            ServingError: of the first sequence that failed; the others are aborted.
        """
        deltas: Sequence[list[TokenDelta]] = [[] for _ in generation.requests]
        async with self.start(generation) as arriving:
            async for item in arriving:
                generation.progress.add(item)
                deltas[item.index].append(item.delta)
        return generation.format.whole([merge(parts) for parts in deltas], generation.progress.usage())

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
