"""Chat and text completions without HTTP: a request body becomes a running generation and its reply."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from replicas.errors import InvalidRequest, ServingError
from replicas.protocol import GenerateRequest, ModelCard, TokenDelta, merge
from replicas.text.grammar import GrammarCompiler
from replicas.text.tokenizer_files import vocab_size_of
from router.dispatch import Dispatcher
from router.timeline import Timeline
from router.types import Headroom
from serve_app.openai.pooling import PooledRequests
from serve_app.openai.reply.chat_format import CHAT_COMPLETION, ReplyKind
from serve_app.openai.reply.fan_in import DeltaContext, IndexedDelta, merge_streams
from serve_app.openai.reply.format import (
    CompletionFormat,
    JsonObject,
    Progress,
    ReplyFormat,
    ReplyHead,
    fingerprint_of,
    json_in_pieces,
)
from serve_app.openai.reply.prepared_completion import ParserOptions, PreparedCompletion
from serve_app.openai.reply.request_metrics import request_metrics
from serve_app.openai.reply.stored_run import StoredRun
from serve_app.openai.request.caller import Caller, WorkOwner, tier_of
from serve_app.openai.request.pooled_schema import EmbeddingBody, RerankBody, ScoreBody
from serve_app.openai.request.sampling_defaults import SamplingDefaults
from serve_app.openai.request.schema import ChatBody, CompletionBody, EncodedPrompt, GenerationBody
from serve_app.openai.request.validation import (
    BodyChecks,
    RequestLimits,
    chat_requests,
    check_echo,
    check_tokens,
    completion_requests,
    refuse_unusable_prompts,
    truncation_of,
    with_lowered_max_tokens,
)
from serve_app.openai.structured.chat_grammar import ChatDialect, callable_tools, chat_grammar, grammar_key
from serve_app.openai.structured.output_grammar import GrammarChecker, OutputGrammar, output_grammar
from serve_app.openai.tokenize.prompt_encoder import ChatTurns, PromptEncoder
from serve_app.openai.tokenize.prompt_tokenizer import PromptTokenizer
from serve_app.openai.tokenize.work_queue import WorkLimits
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from serve_app.openai.tools.grammar import Thinking, thinking_of
from serve_app.openai.tools.parser import OutputParser

_MANY_LOGPROBS = 1000
"""Log probabilities from which a thread formats a reply."""
_FLOAT_BYTES = 4
_NUM_REPLY_THREADS = 2
_MAX_CARD_AGE_S = 30.0
"""Age from which the model's card is asked for again."""
_NO_REFUSAL = WorkLimits(max_queued=10**9, max_queued_bytes=2**62, max_wait_s=86_400.0)
"""Limits of the replies that wait to be formatted: none of its own, since open requests are bounded before."""

ResultT = TypeVar("ResultT")


class KnownModel:
    """Cache of the served model's card, with the model's public names and its defaults of sampling.

    The last known card stays in use while no replica answers. A request is then accepted and waits in flow control,
    where it wakes a deployment that has scaled to zero.
    """

    def __init__(
        self, names: Sequence[str], dispatcher: Dispatcher, clock: Callable[[], float],
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:  # fmt: skip
        """Create the cache; `names` are the names that requests may use, the first of which is in responses."""
        self.names = names
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self._dispatcher = dispatcher
        self.clock = clock
        self._card: ModelCard | None = None
        self._asked_s = 0.0

    @property
    def name(self) -> str:
        """Name of the model in responses."""
        return self.names[0]

    async def card(self) -> ModelCard:
        """Return the model's card; while replicas answer it is at most a little older than `_MAX_CARD_AGE_S`.

        Raises:
            NoReplicaAvailable: no replica has ever answered.
        """
        if self._card is None:
            return await self.refresh()
        if self.clock() - self._asked_s > _MAX_CARD_AGE_S:
            self._asked_s = self.clock()
            with contextlib.suppress(ServingError):
                return await self.refresh()
        return self._card

    async def refresh(self) -> ModelCard:
        """Ask a replica for the model's card.

        Raises:
            NoReplicaAvailable: no replica answers.
        """
        self._card = await self._dispatcher.model_card()
        self._asked_s = self.clock()
        return self._card


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text side of the served model: its tokenizer, and the grammars of its outputs."""

    tokenizer: PromptTokenizer
    grammars: GrammarChecker

    @classmethod
    def load(
        cls,
        model: str,
        workers: WorkerThreads,
        tool_call_parser: str | None = None,
        chat_template: str | None = None,
    ) -> ModelText:
        """Load the tokenizer of `model`, a directory or hub id, whose work `workers` do.

        `tool_call_parser` names the family of its chat template; None: it is found. `chat_template` is a file or the
        name of a template; None: the model's.
        """
        tokenizer = PromptTokenizer(PromptEncoder.load(model, tool_call_parser, chat_template), workers)
        return cls(tokenizer, GrammarChecker(GrammarCompiler(tokenizer.fast, vocab_size_of(model))))


class Meter(Protocol):
    """Meter of the work for completions."""

    def ended(self, prepared: PreparedCompletion) -> None:
        """Note a completion that was started and has ended, well or not."""


class CompletionService:
    """Service that turns bodies into generations, starts them and builds the replies that are not streamed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: KnownModel,
        text: ModelText,
        limits: RequestLimits,
        rng: random.Random,
        meter: Meter | None = None,
    ) -> None:
        """`meter` gets each completion that was started, when it ends; None: nothing is metered."""
        self._dispatcher = dispatcher
        self._meter = meter
        self._model = model
        self._tokenizer = text.tokenizer
        self._grammars = text.grammars
        self._limits = limits
        self.checks = BodyChecks(tuple(model.names), limits)
        """Checks that come before rendering and tokenizing."""
        self._rng = rng
        self._pooled = PooledRequests(model.names, text.tokenizer, limits, model.clock, rng)
        self._replies = WorkerThreads(_NUM_REPLY_THREADS, "replies", _NO_REFUSAL)

    async def chat(self, body: ChatBody, caller: Caller, kind: ReplyKind = CHAT_COMPLETION) -> PreparedCompletion:
        """Prepare a chat completion: render, tokenize and validate its messages; `kind` is that of its reply.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: the body cannot be served.
        """
        self.checks.check_chat(body)
        body = self._model.sampling_defaults.apply(body)
        card = await self._generating_card()
        turns = ChatTurns.of(body)
        owner = caller.owner_of(body)
        prompt = await self._tokenizer.encode_chat(
            turns,
            max_prompt_tokens=_max_prompt_tokens(body, card),
            truncation=truncation_of(body, body.max_completion_tokens or body.max_tokens, card),
            owner=owner,
        )
        text = prompt.text or ""
        check_echo(body, len(prompt.token_ids), self._limits)
        grammar = await self._chat_grammar(body, text, owner)
        caller = replace(caller, request_id=f"{kind.id_prefix}{caller.request_id}")
        if kind.lowers_max_tokens:
            body = with_lowered_max_tokens(body, prompt, caller, card)
        salt = self._limits.cache_salt(caller.principal.tenant, body.cache_salt)
        requests = chat_requests(body, prompt, caller, card, self._rng, salt)
        requests = await self._constrained(body, requests, grammar, owner)
        head = self._head(caller, card, requests)
        parser = self._parser_options(body, text, is_bound=grammar is not None)
        make_parser = self._parser_factory(body, caller.request_id, parser)
        if make_parser is not None and self._tokenizer.marker_token_ids:
            visible = self._tokenizer.marker_token_ids
            requests = tuple(_with_params(generation, visible_special_token_ids=visible) for generation in requests)
        check_tokens(requests, card, "messages", self._tokenizer.token_of)
        return self._prepared(
            head=head,
            caller=caller,
            body=body,
            requests=requests,
            reply_format=kind.make(head, body, prompt.token_ids, self._tokenizer.token_text, make_parser),
            prompts=[prompt],
            grammar=grammar,
            parser=parser,
        )

    def restored(self, run: StoredRun, prompt: Sequence[int], body: ChatBody, kind: ReplyKind) -> PreparedCompletion:
        """Return the chat completion of a run that was accepted before, with the tokens of its prompt."""
        params = run.request.params
        body = body.model_copy(update={"temperature": params.temperature, "top_p": params.top_p})
        make_parser = self._parser_factory(body, run.head.id, run.parser)
        return PreparedCompletion(
            id=run.head.id,
            model=run.head.model,
            account=run.account,
            body=body,
            requests=(replace(run.request, prompt_token_ids=tuple(prompt)),),
            format=kind.make(run.head, body, prompt, self._tokenizer.token_text, make_parser),
            progress=Progress([len(prompt)], 1),
            timelines=(Timeline(self._model.clock()),),
            parser=run.parser,
        )

    async def num_prompt_tokens(self, body: ChatBody, caller: Caller) -> int:
        """Return the number of tokens of a chat's prompt.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: as `chat`, but a prompt may exceed the context.
        """
        self.checks.check_chat(body)
        card = await self._model.card()
        prompt = await self._tokenizer.encode_chat(
            ChatTurns.of(body), max_prompt_tokens=card.max_model_len, owner=caller.owner_of(body)
        )
        return len(prompt.token_ids)

    async def completion(self, body: CompletionBody, caller: Caller) -> PreparedCompletion:
        """Prepare a text completion of one or several prompts.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: the body cannot be served.
        """
        self.checks.check_completion(body)
        body = self._model.sampling_defaults.apply(body)
        card = await self._generating_card()
        refuse_unusable_prompts(body.prompt, card, keeps_end=body.truncate_prompt_tokens is not None)
        grammar, owner, max_tokens = None, caller.owner_of(body), _max_prompt_tokens(body, card)
        if max_tokens is not None:
            check_echo(body, sum(map(self._tokenizer.min_tokens, body.prompt)), self._limits)
        if body.has_constraint:
            grammar = await self._grammars.checked(partial(output_grammar, body), owner)
        truncation = truncation_of(body, body.max_tokens, card)
        prompts = await self._tokenizer.encode_prompts(
            body.prompt, max_prompt_tokens=max_tokens, truncation=truncation, owner=owner
        )
        check_echo(body, sum(len(prompt.token_ids) for prompt in prompts), self._limits)
        caller = replace(caller, request_id=f"cmpl-{caller.request_id}")
        salt = self._limits.cache_salt(caller.principal.tenant, body.cache_salt)
        requests = completion_requests(body, prompts, caller, card, self._rng, salt)
        requests = await self._constrained(body, requests, grammar, owner)
        check_tokens(requests, card, "prompt", self._tokenizer.token_of)
        if body.echo:
            prompts = [await self._with_text(prompt, owner) for prompt in prompts]
        head = self._head(caller, card, requests)
        return self._prepared(
            head=head,
            caller=caller,
            body=body,
            requests=requests,
            reply_format=CompletionFormat(head, body, prompts, self._tokenizer.token_text),
            prompts=prompts,
            grammar=grammar,
        )

    async def pooled(self, body: EmbeddingBody | ScoreBody | RerankBody, caller: Caller) -> PreparedCompletion:
        """Prepare embeddings or scores of texts.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: the body cannot be served.
        """
        self.checks.check_pooled(body)
        card = await self._model.card()
        match body:
            case EmbeddingBody():
                return await self._pooled.embeddings(body, caller, card)
            case ScoreBody():
                return await self._pooled.scores(body, caller, card)
            case RerankBody():
                return await self._pooled.ranks(body, caller, card)

    async def max_model_len(self) -> int:
        """Return the tokens of the model's context.

        Raises:
            NoReplicaAvailable: no replica has ever answered.
        """
        return (await self._model.card()).max_model_len

    async def _generating_card(self) -> ModelCard:
        card = await self._model.card()
        if not card.generates:
            raise InvalidRequest("this model embeds or scores texts; it generates none", "model")
        return card

    def _prepared(
        self,
        *,
        head: ReplyHead,
        caller: Caller,
        body: GenerationBody,
        requests: tuple[GenerateRequest, ...],
        reply_format: ReplyFormat,
        prompts: Sequence[EncodedPrompt],
        grammar: OutputGrammar | None,
        parser: ParserOptions | None = None,
    ) -> PreparedCompletion:
        past = caller.timeline or Timeline(self._model.clock())
        return PreparedCompletion(
            id=head.id,
            model=head.model,
            account=caller.principal.tenant,
            body=body,
            requests=requests,
            format=reply_format,
            progress=Progress([len(prompt.token_ids) for prompt in prompts], body.n),
            timelines=tuple(past.fork() for _ in requests),
            not_enforced=() if grammar is None else grammar.not_enforced,
            parser=parser,
        )

    def headroom(self, prepared: PreparedCompletion) -> Headroom:
        """Return the room that flow control has left for the completion's tenant in its band."""
        return self._dispatcher.headroom(prepared.requests[0].band, prepared.requests[0].tenant)

    def streams(self, prepared: PreparedCompletion) -> DeltaContext:
        """Return the deltas of all sequences. The first read starts them; leaving the context aborts the unfinished."""
        deltas = merge_streams(self._dispatcher.streams(prepared.requests, prepared.timelines))
        return deltas if self._meter is None else self._metered(self._meter, prepared, deltas)

    @contextlib.asynccontextmanager
    async def _metered(
        self, meter: Meter, prepared: PreparedCompletion, deltas: DeltaContext
    ) -> AsyncIterator[AsyncGenerator[IndexedDelta, None]]:
        try:
            async with deltas as arriving:
                yield arriving
        finally:
            meter.ended(prepared)

    async def answer(self, prepared: PreparedCompletion) -> JsonObject:
        """Run the completion and return its whole reply; cancelling the call aborts the sequences.

        Raises:
            ServingError: a sequence failed. The first failure is raised and the other sequences are aborted.
        """
        deltas = await self._deltas(prepared)
        return await self._formatted(prepared, deltas, partial(self._full_reply, prepared, deltas))

    async def answer_json(self, prepared: PreparedCompletion) -> bytes:
        """Do as `answer`, and return the reply as JSON."""
        deltas = await self._deltas(prepared)
        return await self._formatted(prepared, deltas, lambda: json_in_pieces(self._full_reply(prepared, deltas)))

    def closing_fields(self, prepared: PreparedCompletion) -> JsonObject:
        """Return the fields about the whole request that the client asked for at the end of its stream."""
        options, fields = prepared.body.stream_options, {}
        if options is not None and options.include_usage:
            fields["usage"] = prepared.usage()
        if prepared.body.include_metrics:
            fields["metrics"] = self.metrics(prepared)
        return fields

    def metrics(self, prepared: PreparedCompletion) -> JsonObject:
        """Return the parts of the request's time up to now."""
        return request_metrics(prepared.timeline, self._model.clock())

    async def as_json(self, make: Callable[[], JsonObject], caller: Caller) -> bytes:
        """Return a reply that may be large as JSON; a thread makes and writes it."""
        return await self._replies.run(lambda: json_in_pieces(make()), caller.owner_before_parsing)

    async def chunks(self, prepared: PreparedCompletion, item: IndexedDelta) -> list[JsonObject]:
        """Return the chunks of a stream for a delta."""
        return await self._formatted(prepared, [item.delta], partial(prepared.format.chunks, item))

    async def written(self, prepared: PreparedCompletion, item: IndexedDelta) -> bytes:
        """Return the events of a stream for a delta, in place of `chunks`: each delta is read once."""
        delta = item.delta
        if not (delta.logprobs or delta.prompt_logprobs or delta.pooled):
            return prepared.format.written(item)
        return await self._formatted(prepared, [delta], partial(prepared.format.written, item))

    async def _deltas(self, prepared: PreparedCompletion) -> list[TokenDelta]:
        """Run the completion and return one merged delta for each sequence."""
        deltas: Sequence[list[TokenDelta]] = [[] for _ in prepared.requests]
        async with self.streams(prepared) as arriving:
            async for item in arriving:
                prepared.progress.add(item)
                deltas[item.index].append(item.delta)
        return [merge(parts) for parts in deltas]

    async def _formatted(
        self, prepared: PreparedCompletion, deltas: Sequence[TokenDelta], make: Callable[[], ResultT]
    ) -> ResultT:
        """Return what `make` makes of deltas; with many log probabilities a thread does it."""
        num_logprobs = (
            sum(
                len(positions) * (1 + len(positions[0].top))
                for delta in deltas
                for positions in (delta.logprobs, delta.prompt_logprobs)
                if positions
            )
            + sum(len(delta.pooled) for delta in deltas) // _FLOAT_BYTES
        )
        if num_logprobs < _MANY_LOGPROBS:
            return make()
        first = prepared.requests[0]
        return await self._replies.run(make, WorkOwner(first.band, first.tenant))

    async def _constrained(
        self,
        body: GenerationBody,
        requests: tuple[GenerateRequest, ...],
        grammar: OutputGrammar | None,
        owner: WorkOwner,
    ) -> tuple[GenerateRequest, ...]:
        """Return the requests with the grammar of their outputs, and the tokens of the words not to be written."""
        bad_words = await self._tokenizer.word_tokens(body.bad_words, owner) if body.bad_words else ()
        if grammar is None and not bad_words:
            return requests
        text = None if grammar is None else grammar.grammar
        return tuple(_with_params(generation, grammar=text, bad_words=bad_words) for generation in requests)

    async def _chat_grammar(self, body: ChatBody, prompt: str, owner: WorkOwner) -> OutputGrammar | None:
        if not (body.offered_tools or body.has_constraint):
            return None
        dialect = ChatDialect(self._tokenizer.family, self._tokenizer.marker)
        key = grammar_key(body, dialect, prompt)
        return await self._grammars.checked(partial(chat_grammar, body, dialect, prompt), owner, key)

    def _parser_options(self, body: ChatBody, prompt: str, is_bound: bool) -> ParserOptions | None:
        """Return the options of the outputs' parser; None if outputs have neither calls nor reasoning."""
        family = self._tokenizer.family
        if not callable_tools(body) and family.reasoning is None:
            return None
        # Calls that a grammar binds are valid, so they may be shown before they are whole.
        return ParserOptions(thinking_of(family, prompt) is Thinking.OPEN, whole_calls=not is_bound)

    def _parser_factory(
        self, body: ChatBody, request_id: str, options: ParserOptions | None
    ) -> Callable[[], OutputParser] | None:
        """Return the factory of the choices' parsers; None without options."""
        if options is None:
            return None
        # The ids of calls follow from that of the request: a repeated run gives the same ones.
        rng = random.Random(request_id)
        return partial(
            OutputParser,
            self._tokenizer.family,
            callable_tools(body),
            rng,
            options.starts_in_reasoning,
            whole_calls=options.whole_calls,
        )

    async def _with_text(self, prompt: EncodedPrompt, owner: WorkOwner) -> EncodedPrompt:
        if prompt.text is not None:
            return prompt
        return replace(prompt, text=await self._tokenizer.decode(prompt.token_ids, owner))

    def _full_reply(self, prepared: PreparedCompletion, deltas: Sequence[TokenDelta]) -> JsonObject:
        reply = prepared.format.full_reply(deltas, prepared.progress.usage())
        if prepared.not_enforced:
            reply["warnings"] = [f"not enforced: {place}" for place in prepared.not_enforced]
        if prepared.body.include_metrics:
            reply["metrics"] = self.metrics(prepared)
        return reply

    def _head(self, caller: Caller, card: ModelCard, requests: Sequence[GenerateRequest]) -> ReplyHead:
        return ReplyHead(
            id=caller.request_id,
            created=int(caller.arrival_unix_s),
            model=self._model.name,
            system_fingerprint=fingerprint_of(card),
            service_tier=tier_of(requests[0].band),
        )


def _max_prompt_tokens(body: GenerationBody, card: ModelCard) -> int | None:
    """Return the most tokens of a prompt; None if a longer one is truncated."""
    return card.max_model_len if body.truncate_prompt_tokens is None else None


def _with_params(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    return replace(request, params=replace(request.params, **changes))
