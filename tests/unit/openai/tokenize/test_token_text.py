"""Text of single tokens, for each kind of tokenizer."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve_app.openai.tokenize.prompt_tokenizer import TokenText

EURO = "€".encode()


def byte_level() -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end é|>", special=True)])
    tokenizer.add_tokens([AddedToken("Größe")])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    pieces = ["▁hello", "wörld", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def test_byte_level_tokens_are_their_bytes() -> None:
    tokenizer = byte_level()
    tokens = TokenText(tokenizer)
    token_ids = tokenizer.encode("a €\n").ids
    assert [tokens.bytes_of(token_id) for token_id in token_ids] == [
        b"a",
        b" ",
        *(bytes([byte]) for byte in EURO),
        b"\n",
    ]
    assert [tokens.name_of(token_id) for token_id in token_ids] == [
        "a",
        " ",
        "bytes:\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
        "\n",
    ]


def test_every_byte_has_a_token_in_the_byte_level_alphabet() -> None:
    tokens = TokenText(byte_level())
    assert {tokens.bytes_of(token_id) for token_id in range(256)} == {bytes([byte]) for byte in range(256)}


def test_added_tokens_are_spelt_as_they_are() -> None:
    tokenizer = byte_level()
    tokens = TokenText(tokenizer)
    special, plain = id_of(tokenizer, "<|end é|>"), id_of(tokenizer, "Größe")
    assert [tokens.name_of(token_id) for token_id in (special, plain)] == ["<|end é|>", "Größe"]
    assert [tokens.is_special(token_id) for token_id in (special, plain, 0)] == [True, False, False]


def test_sentencepiece_tokens_have_spaces_and_bytes() -> None:
    tokenizer = sentencepiece_like()
    tokens = TokenText(tokenizer)
    assert tokens.name_of(id_of(tokenizer, "▁hello")) == " hello"
    assert tokens.name_of(id_of(tokenizer, "wörld")) == "wörld"
    assert tokens.bytes_of(id_of(tokenizer, "<0xE2>")) == b"\xe2"


def test_id_beyond_the_vocabulary_is_empty() -> None:
    assert TokenText(byte_level()).name_of(10_000) == ""
