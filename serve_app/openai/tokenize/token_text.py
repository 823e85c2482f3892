"""Bytes and names of single tokens, as log probabilities show them."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


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
