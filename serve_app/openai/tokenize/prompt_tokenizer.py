"""Tokenizer and chat template: prompts become token ids in worker threads, and single tokens become text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from replicas.errors import InvalidRequest
from replicas.tokenizer_files import load_tokenizer
from serve_app.errors import shortened
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.conversation import ChatMessage
from serve_app.openai.request.schema import ChatBody, EncodedPrompt, Prompt, TokenizeBody
from serve_app.openai.request.validation import prompt_too_long
from serve_app.openai.tokenize.worker_threads import SERVER, WorkerThreads
from serve_app.openai.tools.detection import adapted, detect, probed
from serve_app.openai.tools.families import GENERIC, ChatFamily, ToolList, family_named
from serve_app.openai.tools.messages import prompt_messages
from serve_app.openai.tools.response_template import described_family
from serve_app.openai.tools.shapes.shape import marker_of, special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Variables of a chat template, and arguments of its rendering, that a request cannot set."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """Conversation to render with a chat template."""

    messages: Sequence[ChatMessage]
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
            body.messages or (),
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


class PromptTokenizer:
    """Tokenizer of messages and texts, which works in worker threads.

    Only the batch calls of `tokenizers` release the GIL, so even a single text is encoded as a batch.
    The chat template is the only code of a model that runs, in transformers' Jinja sandbox.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, name: str, workers: WorkerThreads, tool_call_parser: str | None = None
    ) -> None:
        """Create the tokenizer; `tool_call_parser` names the family of the chat template. None: it is found.

        Raises:
            ValueError: there is no family of this name.
        """
        backend: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer file may switch on truncation and padding; both would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.fast = tokenizer
        """The tokenizer as transformers has it, with its chat template."""
        self._tokenizer = backend
        self._name = name
        self._workers = workers
        self._max_token_chars = max(map(len, backend.get_vocab()))
        self._knows_developer = "developer" in str(tokenizer.chat_template)
        self.token_text = TokenText(backend)
        added = {token.content: (token_id, token.special) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self.family = self._family_of(tool_call_parser, added)
        """Family of the chat template: the form of calls and reasoning."""
        self.marker = marker_of(special_token_ids(added))
        """Function that writes the family's markers in a grammar."""
        special = {content: token_id for content, (token_id, is_special) in added.items() if is_special}
        self.marker_token_ids = tuple(sorted(special[token] for token in self.family.visible_tokens(special)))
        """Special tokens that outputs must show, so that calls and reasoning can be parsed."""

    @classmethod
    def load(cls, model: str, workers: WorkerThreads, tool_call_parser: str | None = None) -> PromptTokenizer:
        """Load the tokenizer of `model`, a directory or hub id."""
        return cls(load_tokenizer(model), model, workers, tool_call_parser)

    async def encode_chat(
        self,
        turns: ChatTurns,
        *,
        max_prompt_tokens: int | None = None,
        add_special_tokens: bool = False,
        owner: WorkOwner = SERVER,
    ) -> EncodedPrompt:
        """Render a conversation with the model's chat template and encode it.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses the messages, or their text
                is too long for `max_prompt_tokens` tokens.
            Overloaded: too much work waits.
        """
        num_chars = sum(len(message.content or "") for message in turns.messages)

        def encode() -> EncodedPrompt:
            self._refuse_hopeless(turns, max_prompt_tokens)
            text = self._render(turns)
            self._refuse_oversized(text, "messages", max_prompt_tokens)
            return self._encode(text, add_special_tokens)

        return await self._workers.run(encode, owner, num_chars)

    async def encode_prompts(
        self,
        prompts: Sequence[Prompt],
        *,
        max_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        owner: WorkOwner = SERVER,
    ) -> list[EncodedPrompt]:
        """Encode texts, by default with the model's special tokens; token ids stay as they are.

        Raises:
            InvalidRequest: a text is too long for `max_prompt_tokens` tokens.
            Overloaded: too much work waits.
        """
        num_bytes = sum(map(len, prompts))

        def encode(prompt: Prompt) -> EncodedPrompt:
            if not isinstance(prompt, str):
                return EncodedPrompt(tuple(prompt), None)
            return self._encode(prompt, add_special_tokens)

        def encode_all() -> list[EncodedPrompt]:
            for prompt in prompts:
                if isinstance(prompt, str):
                    self._refuse_oversized(prompt, "prompt", max_prompt_tokens)
            return [encode(prompt) for prompt in prompts]

        return await self._workers.run(encode_all, owner, num_bytes)

    async def word_tokens(self, words: Sequence[str], owner: WorkOwner = SERVER) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of words, at the beginning of a text and behind a space."""
        texts = [f"{space}{word.lstrip()}" for word in words for space in ("", " ")]
        encoded = await self.encode_prompts(texts, add_special_tokens=False, owner=owner)
        return tuple(dict.fromkeys(prompt.token_ids for prompt in encoded if prompt.token_ids))

    async def decode(self, token_ids: Sequence[int], owner: WorkOwner = SERVER) -> str:
        """Return the text of token ids, special tokens included."""

        def decode() -> str:
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
            return text

        return await self._workers.run(decode, owner, len(token_ids))

    async def token_strings(self, token_ids: Sequence[int], owner: WorkOwner = SERVER) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return await self._workers.run(
            lambda: [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids],
            owner,
            len(token_ids),
        )

    def info(self) -> dict[str, Any]:
        """Return the facts about the tokenizer that clients may need."""
        fast = self.fast
        return {
            "tokenizer_class": type(fast).__name__,
            "vocab_size": len(fast),
            "bos_token": fast.bos_token,
            "eos_token": fast.eos_token,
            "pad_token": fast.pad_token,
            "unk_token": fast.unk_token,
            "additional_special_tokens": sorted(
                token.content for token in fast.added_tokens_decoder.values() if token.special
            ),
            "chat_template": None if fast.chat_template is None else str(fast.chat_template),
            "tool_call_parser": self.family.name,
        }

    def _family_of(self, name: str | None, added: Mapping[str, tuple[int, bool]]) -> ChatFamily:
        """Return the family of the chat template, adapted to what the template renders."""
        template = str(self.fast.chat_template or "")
        family = detect(template, added) if name is None else adapted(family_named(name), template, added)
        described = getattr(self.fast, "response_template", None)
        if name is None and family.name == GENERIC.name and isinstance(described, dict):
            family = adapted(described_family(described) or family, template, added)
        if not template:
            return family
        return probed(family, lambda turns: self._apply_template(turns, add_generation_prompt=True))

    def _render(self, turns: ChatTurns) -> str:
        if not self.fast.chat_template:
            raise InvalidRequest(f"model `{self._name}` has no chat template; use /v1/completions", "messages")
        messages = [message.turn() for message in turns.messages]
        for message in messages:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        prompt = prompt_messages(self.family, messages, turns.tools)
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

    def _apply_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return str(self.fast.apply_chat_template(messages, tokenize=False, **variables))

    def _encode(self, text: str, add_special_tokens: bool) -> EncodedPrompt:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return EncodedPrompt(tuple(encoding.ids), text)

    def min_tokens(self, prompt: Prompt) -> int:
        """Return the least number of tokens that a prompt may have: as if each were the vocabulary's longest."""
        return -(-len(prompt) // self._max_token_chars) if isinstance(prompt, str) else len(prompt)

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


class TokenText:
    """Cache of the bytes of single tokens of one tokenizer, and their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._marks_spaces = bool(kinds & {"Metaspace", "Replace", "ByteFallback"})
        self._added = {
            token_id: (added.content, added.special) for token_id, added in tokenizer.get_added_tokens_decoder().items()
        }
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's UTF-8 bytes, which may be a part of a character; an unknown id has none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._decode(token_id)
        return known

    def name_of(self, token_id: int) -> str:
        r"""Return the token's text; for invalid UTF-8 its bytes in OpenAI's notation, such as `bytes:\xe2\x80`."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token_id: int) -> bool:
        """Return True if generated text leaves the token out."""
        return self._added.get(token_id, ("", False))[1]

    def _decode(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTE_OF_CHAR[char] for char in token if char in _BYTE_OF_CHAR)
        byte_token = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte_token is not None:
            return bytes.fromhex(byte_token[1])
        return (token.replace("\u2581", " ") if self._marks_spaces else token).encode()


def _decoder_kinds(decoder: dict[str, object] | None) -> set[str]:
    """Return the types of all decoders in a tokenizer's chain of decoders."""
    if decoder is None:
        return set()
    parts = decoder.get("decoders", [])
    assert isinstance(parts, list)
    return {str(decoder["type"])}.union(*(_decoder_kinds(part) for part in parts))


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level tokenizers: a printable byte is itself, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
