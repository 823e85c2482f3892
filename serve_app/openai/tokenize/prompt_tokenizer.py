"""Tokenizer and chat template: prompts become token ids in worker threads, and single tokens become text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from replicas.errors import InvalidRequest
from replicas.tokenizer_files import load_tokenizer
from serve_app.openai.request.schema import ChatMessage, EncodedPrompt, Prompt
from serve_app.openai.request.validation import prompt_too_long

ResultT = TypeVar("ResultT")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class WorkerThreads:
    """Thread pool of fixed size; work waits for a free thread in order of arrival.

    Work that holds the GIL throughout a call into C still blocks the event loop.
    """

    def __init__(self, num_threads: int, name: str = "tokenizer") -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread and return its result.

        A cancelled caller returns at once. Work that still waits is then dropped; work that runs continues to its end
        and occupies its thread until then.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class PromptTokenizer:
    """Tokenizer of messages and texts, which works in worker threads.

    Only the batch calls of `tokenizers` release the GIL, so even a single text is encoded as a batch.
    The chat template is the only code of a model that runs, in transformers' Jinja sandbox.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str, workers: WorkerThreads) -> None:
        backend: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer file may switch on truncation and padding; both would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.fast = self._templates = tokenizer
        self._tokenizer = backend
        self._name = name
        self._workers = workers
        self._max_token_chars = max(map(len, backend.get_vocab()))
        self._knows_developer = "developer" in str(tokenizer.chat_template)
        self.token_text = TokenText(backend)

    @classmethod
    def load(cls, model: str, workers: WorkerThreads) -> PromptTokenizer:
        """Load the tokenizer of `model`, a directory or hub id."""
        return cls(load_tokenizer(model), model, workers)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_prompt_tokens: int | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> EncodedPrompt:
        """Render messages with the model's chat template and encode them.

        With `add_generation_prompt` the text ends where the assistant's turn begins.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses the messages, or their text
                is too long for `max_prompt_tokens` tokens.
        """

        def encode() -> EncodedPrompt:
            text = self._render(messages, add_generation_prompt)
            self._refuse_oversized(text, "messages", max_prompt_tokens)
            return self._encode(text, add_special_tokens)

        return await self._workers.run(encode)

    async def encode_prompts(
        self, prompts: Sequence[Prompt], *, max_prompt_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[EncodedPrompt]:
        """Encode texts, by default with the model's special tokens; token ids stay as they are.

        Raises:
            InvalidRequest: a text is too long for `max_prompt_tokens` tokens.
        """

        def encode(prompt: Prompt) -> EncodedPrompt:
            if not isinstance(prompt, str):
                return EncodedPrompt(tuple(prompt), None)
            self._refuse_oversized(prompt, "prompt", max_prompt_tokens)
            return self._encode(prompt, add_special_tokens)

        return await self._workers.run(lambda: [encode(prompt) for prompt in prompts])

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""

        def decode() -> str:
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
            return text

        return await self._workers.run(decode)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return await self._workers.run(
            lambda: [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids],
        )

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        if not self._templates.chat_template:
            raise InvalidRequest(f"model `{self._name}` has no chat template; use /v1/completions", "messages")
        turns = [message.model_dump(exclude_none=True) for message in messages]
        for turn in turns:
            if turn["role"] == "developer" and not self._knows_developer:
                turn["role"] = "system"
        try:
            return str(
                self._templates.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", "messages") from None

    def _encode(self, text: str, add_special_tokens: bool) -> EncodedPrompt:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return EncodedPrompt(tuple(encoding.ids), text)

    def _refuse_oversized(self, text: str, param: str, max_prompt_tokens: int | None) -> None:
        """Refuse, without tokenizing, a text that is too long even if every token were the vocabulary's longest."""
        min_tokens = -(-len(text) // self._max_token_chars)
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
