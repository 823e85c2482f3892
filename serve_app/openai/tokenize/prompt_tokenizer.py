"""Tokenizer: prompts become token ids, long ones in worker threads and processes; single tokens become text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.schema import EncodedPrompt, Prompt
from serve_app.openai.request.validation import Truncation
from serve_app.openai.tokenize.prompt_encoder import ChatTurns, PromptEncoder
from serve_app.openai.tokenize.worker_threads import SERVER, WorkerThreads
from serve_app.openai.tools.shapes.shape import marker_of, special_token_ids

_LONG_PROMPT_BYTES = 2**10
"""Size from which a prompt is tokenized in a thread. For a shorter one the way there and back would cost as much."""
_MAX_TOKEN_IDS = 2**32
"""The tokenizer has smaller ids only."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class PromptTokenizer:
    """Tokenizer of messages and texts. Long ones, and tools, go to worker threads and their processes."""

    def __init__(self, encoder: PromptEncoder, workers: WorkerThreads) -> None:
        self._encoder = encoder
        self._workers = workers
        self.fast = encoder.fast
        """The tokenizer as transformers has it, with its chat template."""
        self._tokenizer: Tokenizer = encoder.fast.backend_tokenizer
        self.token_text = TokenText(self._tokenizer)
        self.family = encoder.family
        """Family of the chat template: the form of calls and reasoning."""
        self.min_tokens = encoder.min_tokens
        """Function that returns the least number of tokens that a prompt may have."""
        self.marker = marker_of(special_token_ids(encoder.added))
        """Function that writes the family's markers in a grammar."""
        special = {content: token_id for content, (token_id, is_special) in encoder.added.items() if is_special}
        self.marker_token_ids = tuple(sorted(special[token] for token in self.family.visible_tokens(special)))
        """Special tokens that outputs must show, so that calls and reasoning can be parsed."""

    async def encode_chat(
        self,
        turns: ChatTurns,
        *,
        max_prompt_tokens: int | None = None,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
        owner: WorkOwner = SERVER,
    ) -> EncodedPrompt:
        """Render a conversation with the model's chat template and encode it.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses the messages, or their text
                is too long for `max_prompt_tokens` tokens.
            Overloaded: too much work waits.
            NoReplicaAvailable: the process that did the work has ended.
        """
        limits = max_prompt_tokens, add_special_tokens, truncation
        work = partial(self._encoder.encode_chat, turns, *limits, owner.tenant)
        thread_bytes = 0 if turns.tools else _LONG_PROMPT_BYTES
        return await self._workers.run_by_size(work, owner, turns.messages.num_bytes, thread_bytes)

    async def encode_prompts(
        self,
        prompts: Sequence[Prompt],
        *,
        max_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
        field: str = "prompt",
        owner: WorkOwner = SERVER,
    ) -> list[EncodedPrompt]:
        """Encode texts of a `field`, by default with the model's special tokens; token ids stay as they are.

        Raises:
            InvalidRequest: a text is too long for `max_prompt_tokens` tokens.
            Overloaded, NoReplicaAvailable: as `encode_chat` does.
        """
        self._encoder.refuse_long_texts(prompts, max_prompt_tokens, field)  # Before the texts go to another process.
        work = partial(self._encoder.encode_prompts, prompts, max_prompt_tokens, add_special_tokens, truncation, field)
        return await self._workers.run_by_size(work, owner, sum(map(len, prompts)), _LONG_PROMPT_BYTES)

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        max_prompt_tokens: int,
        truncation: Truncation | None = None,
        owner: WorkOwner = SERVER,
    ) -> list[EncodedPrompt]:
        """Encode pairs of a query and a document.

        Raises:
            InvalidRequest, Overloaded, NoReplicaAvailable: as `encode_prompts` does.
        """
        work = partial(self._encoder.encode_pairs, pairs, max_prompt_tokens, truncation)
        num_bytes = sum(len(text) for pair in pairs for text in pair)
        return await self._workers.run_by_size(work, owner, num_bytes, _LONG_PROMPT_BYTES)

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

    def token_of(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None: the tokenizer does not know the id."""
        return self._tokenizer.id_to_token(token_id) if token_id < _MAX_TOKEN_IDS else None

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
