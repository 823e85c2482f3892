"""Encoder of prompts: conversations and texts become token ids in the thread that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import Encoding, Tokenizer

from replicas.errors import InvalidRequest
from replicas.text.tokenizer_files import load_tokenizer, vocab_size_of
from serve_app.errors import shortened
from serve_app.openai.request.conversation import NO_MESSAGES, MessageList
from serve_app.openai.request.schema import ChatBody, EncodedPrompt, Prompt, TokenizeBody
from serve_app.openai.request.validation import Truncation, prompt_too_long
from serve_app.openai.tokenize.segments import segment_encoder
from serve_app.openai.tools.detection import adapted, detect, probed
from serve_app.openai.tools.families import GENERIC, ChatFamily, ToolList, family_named
from serve_app.openai.tools.messages import prompt_messages
from serve_app.openai.tools.response_template import described_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBE = "headway_probe"
_TURNS = [
    {"role": "user", "content": _PROBE},
    {"role": "assistant", "content": _PROBE},
    {"role": "user", "content": _PROBE},
]
_PAIR_PROBE = ("headway_query", "headway_document")
_CHARS_PER_TOKEN, _SPARE_TOKENS = 8, 64
"""Beginning of a text that is tokenized first: characters for each token, and tokens beyond those that are kept."""
_LONG_TEXT_CHARS = 4096
"""Length from which a rendered conversation is encoded by segments, characters."""
_RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Variables of a chat template, and arguments of its rendering, that a request cannot set."""


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """Conversation to render with a chat template."""

    messages: MessageList
    tools: Sequence[dict[str, Any]] = ()
    """Tools in OpenAI's form."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    add_generation_prompt: bool = True
    """True if the text ends where the assistant's turn begins."""
    continue_final_message: bool = False
    """True if the text ends within the last message."""

    @classmethod
    def of(cls, body: ChatBody | TokenizeBody) -> ChatTurns:
        """Return the conversation of a body.

        Raises:
            InvalidRequest: a variable of the template has a name that the server sets.
        """
        for name in sorted(_RESERVED & body.chat_template_kwargs.keys()):
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"`{param}` is set by the server", param)
        return cls(
            NO_MESSAGES if body.messages is None else body.messages,
            [tool.model_dump(exclude_none=True, exclude_defaults=True) for tool in body.offered_tools],
            {**_reasoning_variables(body.reasoning_effort), **body.chat_template_kwargs},
            body.begins_turn,
            body.continue_final_message,
        )


def _reasoning_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables by which chat templates know the effort of the reasoning."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True, "thinking": True}


class PromptEncoder:
    """Encoder of conversations and texts with a model's chat template and tokenizer.

    Only the batch calls of `tokenizers` release the GIL, so even a single text is encoded as a batch.
    The chat template is the only code of a model that runs, in transformers' Jinja sandbox.
    Pickled, it is the name of its model; each process loads that once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        name: str,
        tool_call_parser: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Create the encoder; `tool_call_parser` names the family of the chat template. None: it is found.

        `chat_template` is a file, or the name of one of the model's templates, in place of the model's.

        Raises:
            ValueError: there is no family or template of this name, or the template does not show a user's message.
            OSError: the file cannot be read.
        """
        if chat_template is not None:
            tokenizer.chat_template = _template(tokenizer, chat_template)
        backend: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer file may switch on truncation and padding; both would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.fast = tokenizer
        """The tokenizer as transformers has it, with its chat template."""
        self._tokenizer = backend
        self._name = name
        self._forms = (tool_call_parser, chat_template)
        self._max_token_chars = max(map(len, backend.get_vocab()))
        vocab_size = vocab_size_of(name)
        self.added = {
            token.content: (token_id, token.special)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if vocab_size is None or token_id < vocab_size
        }
        """Ids of the added tokens that the model can generate, and which of them are special."""
        self._takes_parts = False
        self._takes_parts = not self._shows(_PROBE) and self._shows(_parts(_PROBE))
        self.family = self._family_of(tool_call_parser, self.added)
        """Family of the chat template: the form of calls and reasoning."""
        if chat_template is not None:
            self._check_template(chat_template)
        self._has_pair_roles = self._shows_pairs()
        self._segments = segment_encoder(backend, lambda: self._probe(_TURNS, [])) if tokenizer.chat_template else None

    @classmethod
    def load(cls, model: str, tool_call_parser: str | None = None, chat_template: str | None = None) -> PromptEncoder:
        """Load the tokenizer of `model`, a directory or hub id."""
        return cls(load_tokenizer(model), model, tool_call_parser, chat_template)

    def __reduce__(self) -> tuple[Callable[..., PromptEncoder], tuple[str | None, ...]]:
        """Return the function that gives another process its encoder of the same model, and the arguments."""
        return encoder_of, (self._name, *self._forms)

    def encode_chat(
        self,
        turns: ChatTurns,
        max_prompt_tokens: int | None,
        add_special_tokens: bool,
        truncation: Truncation | None = None,
        tenant: str = "",
    ) -> EncodedPrompt:
        """Render a conversation with the model's chat template and encode it; the text is that before the truncation.

        Of a long text, segments that `tenant` has sent before are not encoded again.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses the messages or would leave some out,
                or their text is too long for `max_prompt_tokens` tokens.
        """
        self._refuse_hopeless(turns, max_prompt_tokens)
        text = self._render(turns)
        self._refuse_oversized(text, "messages", max_prompt_tokens)
        if self._segments is None or add_special_tokens or len(text) < _LONG_TEXT_CHARS:
            return replace(self._encode(text, add_special_tokens, truncation), text=text)
        return replace(self._encode(self._segments.encode(text, tenant), False, truncation), text=text)

    def encode_prompts(
        self,
        prompts: Sequence[Prompt],
        max_prompt_tokens: int | None,
        add_special_tokens: bool,
        truncation: Truncation | None = None,
        field: str = "prompt",
    ) -> list[EncodedPrompt]:
        """Encode texts of a `field`; token ids stay as they are. What is cut has no text.

        Raises:
            InvalidRequest: a text is too long for `max_prompt_tokens` tokens.
        """
        self.refuse_long_texts(prompts, max_prompt_tokens, field)
        return [self._encode(prompt, add_special_tokens, truncation) for prompt in prompts]

    def refuse_long_texts(
        self, prompts: Sequence[Prompt], max_prompt_tokens: int | None, field: str = "prompt"
    ) -> None:
        """Refuse texts that are too long even if every token were the vocabulary's longest; this takes no time.

        Raises:
            InvalidRequest: a text is too long for `max_prompt_tokens` tokens.
        """
        for prompt in prompts:
            if isinstance(prompt, str):
                self._refuse_oversized(prompt, field, max_prompt_tokens)

    def min_tokens(self, prompt: Prompt) -> int:
        """Return the least number of tokens that a prompt may have: as if each were the vocabulary's longest."""
        return -(-len(prompt) // self._max_token_chars) if isinstance(prompt, str) else len(prompt)

    def _family_of(self, name: str | None, added: Mapping[str, tuple[int, bool]]) -> ChatFamily:
        """Return the family of the chat template, adapted to what the template renders."""
        template = str(self.fast.chat_template or "")
        family = detect(template, added) if name is None else adapted(family_named(name), template, added)
        described = getattr(self.fast, "response_template", None)
        if name is None and family.name == GENERIC.name and isinstance(described, dict):
            family = adapted(described_family(described) or family, template, added)
        if not template:
            return family
        return probed(family, self._probe)

    def _render(self, turns: ChatTurns) -> str:
        if not self.fast.chat_template:
            raise InvalidRequest(f"model `{self._name}` has no chat template; use /v1/completions", "messages")
        prompt = prompt_messages(self.family, [message.turn() for message in turns.messages], turns.tools)
        is_listed = bool(turns.tools) and self.family.tool_list is ToolList.TEMPLATE
        try:
            return self._apply_template(
                prompt,
                tools=list(turns.tools) if is_listed else None,
                add_generation_prompt=turns.add_generation_prompt,
                continue_final_message=turns.continue_final_message,
                **turns.variables,
            )
        except Exception as error:  # A template is a program of the model: it may raise anything.
            reason = error if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: {error}"
            refusal = f"the model's chat template refuses the messages: {shortened(str(reason))}"
            raise InvalidRequest(refusal, "messages") from None

    def _check_template(self, name: str) -> None:
        """Render a user's message with the template `name`, and find it in the text."""
        try:
            text = self._probe([{"role": "user", "content": _PROBE}], [])
        except Exception as error:  # A template is a program of the operator's: it may raise anything.
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            reason = f"{type(error).__name__}: {shortened(str(error))}{line}"
            raise ValueError(f"chat_template {name} cannot render a user's message: {reason}") from None
        if _PROBE not in text:
            raise ValueError(f"chat_template {name} leaves out a user's message; it must write `messages`")

    def _shows(self, content: object) -> bool:
        """Return True if the chat template writes the text of a user's message with this content."""
        try:
            return _PROBE in self._probe([{"role": "user", "content": content}], [])
        except Exception:  # A template is a program of the model: it may raise anything.
            return False

    def _shows_pairs(self) -> bool:
        """Return True if the chat template writes the texts of the roles `query` and `document`."""
        if not self.fast.chat_template:
            return False
        try:
            text = self._apply_template(_pair_messages(*_PAIR_PROBE), add_generation_prompt=False)
        except Exception:  # A template is a program of the model: it may raise anything.
            return False
        return all(part in text for part in _PAIR_PROBE) and "query" in str(self.fast.chat_template)

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        return self._apply_template(messages, tools=tools or None, add_generation_prompt=True)

    def _apply_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        if self._takes_parts:
            messages = [
                turn | {"content": _parts(turn["content"])} if isinstance(turn.get("content"), str) else turn
                for turn in messages
            ]
        return str(self.fast.apply_chat_template(messages, tokenize=False, **variables))

    def _encode(
        self, prompt: str | Sequence[int], add_special_tokens: bool, truncation: Truncation | None
    ) -> EncodedPrompt:
        """Return the token ids, and the text unless it is cut."""
        token_ids: Sequence[int]
        if isinstance(prompt, str) and truncation is not None and truncation.keeps_special:
            return EncodedPrompt(tuple(self._cut(prompt, truncation).ids), None)
        if isinstance(prompt, str):
            (encoding,) = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
            token_ids = encoding.ids
        else:
            token_ids = prompt
        kept_ids = token_ids if truncation is None else truncation.kept(token_ids)
        is_whole_text = isinstance(prompt, str) and len(kept_ids) == len(token_ids)
        return EncodedPrompt(tuple(kept_ids), str(prompt) if is_whole_text else None)

    def _cut(self, text: str, truncation: Truncation) -> Encoding:
        """Return the encoding of a text within a number of tokens, special ones included.

        If the end is cut, only a beginning of the text is tokenized. It is twice as long until it has more tokens than
        are kept, so that the last of these are those of the whole text.
        """
        most = max(0, truncation.num_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=False))
        num_chars = len(text) if truncation.keeps_end else _CHARS_PER_TOKEN * (most + _SPARE_TOKENS)
        encoding = self._tokenizer.encode(text[:num_chars], add_special_tokens=False)
        while num_chars < len(text) and len(encoding) < most + _SPARE_TOKENS:
            num_chars *= 2
            encoding = self._tokenizer.encode(text[:num_chars], add_special_tokens=False)
        encoding.truncate(most, direction="left" if truncation.keeps_end else "right")
        return self._tokenizer.post_process(encoding, None, True)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_prompt_tokens: int, truncation: Truncation | None
    ) -> list[EncodedPrompt]:
        """Encode pairs of a query and a document: with the chat template if it has these roles, else as pairs.

        Raises:
            InvalidRequest: a pair is too long, or is to be cut where a template writes it.
        """
        for pair in pairs:
            self._refuse_oversized("".join(pair), "documents", max_prompt_tokens if truncation is None else None)
        if not self._has_pair_roles:
            return [EncodedPrompt(tuple(self._pair(*pair, truncation).ids), None) for pair in pairs]
        if truncation is not None:
            message = "is not supported for this model, whose chat template writes around the texts"
            raise InvalidRequest(f"`truncate_prompt_tokens` {message}", "truncate_prompt_tokens")
        texts = [self._apply_template(_pair_messages(*pair), add_generation_prompt=False) for pair in pairs]
        return [self._encode(text, False, None) for text in texts]

    def _pair(self, query: str, document: str, truncation: Truncation | None) -> Encoding:
        first, second = (self._tokenizer.encode(text, add_special_tokens=False) for text in (query, document))
        if truncation is not None:
            num_added = self._tokenizer.num_special_tokens_to_add(is_pair=True)
            second.truncate(max(0, truncation.num_tokens - num_added - len(first)), direction="right")
        return self._tokenizer.post_process(first, second, True)

    def _refuse_hopeless(self, turns: ChatTurns, max_prompt_tokens: int | None) -> None:
        """Refuse, without rendering, a conversation whose users' texts alone are too long.

        Templates strip texts, and some leave out parts of the model's turns.
        """
        texts = (message.content or "" for message in turns.messages if message.role == "user")
        min_tokens = -(-sum(len(text.strip()) for text in texts) // self._max_token_chars)
        if max_prompt_tokens is not None and min_tokens > max_prompt_tokens:
            raise prompt_too_long(min_tokens, max_prompt_tokens, "messages", at_least=True)

    def _refuse_oversized(self, text: str, param: str, max_prompt_tokens: int | None) -> None:
        """Refuse, without tokenizing, a text that is too long even if every token were the vocabulary's longest."""
        min_tokens = self.min_tokens(text)
        if max_prompt_tokens is not None and min_tokens > max_prompt_tokens:
            raise prompt_too_long(min_tokens, max_prompt_tokens, param, at_least=True)


@functools.cache
def encoder_of(model: str, tool_call_parser: str | None, chat_template: str | None = None) -> PromptEncoder:
    """Return this process's encoder of a model; it is loaded once."""
    return PromptEncoder.load(model, tool_call_parser, chat_template)


def _parts(text: str) -> list[dict[str, str]]:
    """Return a message's content as a list. Some templates of models for images write no other."""
    return [{"type": "text", "text": text}]


def _pair_messages(query: str, document: str) -> list[dict[str, Any]]:
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def _template(tokenizer: PreTrainedTokenizerFast, name: str) -> str:
    """Return the text of a chat template: that of a file, or one of the model's by its name."""
    if Path(name).is_file():
        return Path(name).read_text(encoding="utf-8")
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if name not in own:
        choice = f"a file or one of {', '.join(sorted(own))}" if own else "a file: the model has no named templates"
        raise ValueError(f"chat_template is {name!r}; it must be {choice}")
    return str(own[name])
