"""Streaming text: never half a character, the pieces make the whole, and garbage holds nothing up."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from replicas.model.loading.tokenizer import make_decoder
from testkit.model.tiny_checkpoints import tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
WORDS = ["▁", "▁hello", "▁world", "hello", "é", "▁👍", "s", ",", "!"]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama-2's: words carry their leading space, unknown characters are spelled in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *"abcdefghijklmnopqrtuvwxyz"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


SENTENCEPIECE = sentencepiece_tokenizer()
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈👍🏽é한ﷺ𒐫\u200d\ufe0f"
# Without U+FFFD, which at the end of a text is taken for half a character.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}")
TEXT = st.text(st.one_of(st.sampled_from(EMOJI + " ab\n"), CHARACTERS), max_size=40)


def pieces(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    decoder = make_decoder(tokenizer, prompt)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.finish()]


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> str:
    return tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_pieces_make_the_whole_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, token_ids)
    assert "".join(parts) == decode(tokenizer, token_ids)
    assert not any("�" in part for part in parts)


@settings(max_examples=60, deadline=None)
@given(text=TEXT.filter(lambda text: text != ""), data=st.data())
def test_output_continues_the_prompt(text: str, data: st.DataObject) -> None:
    for tokenizer in TOKENIZERS.values():
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        split = data.draw(st.integers(0, len(token_ids)))
        prompt = decode(tokenizer, token_ids[:split])
        if prompt.endswith("�"):
            continue
        output = "".join(pieces(tokenizer, token_ids[split:], tuple(token_ids[:split])))
        assert prompt + output == decode(tokenizer, token_ids)


def test_first_word_keeps_its_space_after_a_prompt() -> None:
    hello, world = SENTENCEPIECE.convert_tokens_to_ids(["▁hello", "▁world"])
    assert pieces(SENTENCEPIECE, [world], prompt=(1, hello)) == [" world", ""]
    assert pieces(SENTENCEPIECE, [world], prompt=(1,)) == ["world", ""]
    assert pieces(SENTENCEPIECE, [world]) == ["world", ""]
    [space] = SENTENCEPIECE.convert_tokens_to_ids(["▁"])
    assert pieces(SENTENCEPIECE, [space], prompt=(space,)) == [" ", ""]


def test_character_of_a_prompt_cut_in_half_is_completed() -> None:
    token_ids = BYTE_LEVEL.encode("a👍b", add_special_tokens=False)
    assert "".join(pieces(BYTE_LEVEL, token_ids[3:], prompt=tuple(token_ids[:3]))) == "👍b"


def test_special_and_unknown_tokens_have_no_text() -> None:
    for tokenizer in TOKENIZERS.values():
        token_ids = tokenizer.encode("hello 👍 world", add_special_tokens=False)
        noisy = [noise for token_id in token_ids for noise in (token_id, 1, 2, 999_999)]
        assert "".join(pieces(tokenizer, noisy)) == "hello 👍 world"


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_random_tokens_give_their_text_with_a_bounded_delay(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for _ in range(100):
        token_ids = [rng.randrange(len(tokenizer)) for _ in range(200)]
        decoder = make_decoder(tokenizer)
        waiting = 0
        for token_id in token_ids:
            has_text = token_id not in tokenizer.all_special_ids
            waiting = 0 if decoder.push(token_id) else waiting + has_text
            assert waiting <= 16


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_valid_text_after_garbage_is_intact(tokenizer: PreTrainedTokenizerFast) -> None:
    lone = [i for i in range(len(tokenizer)) if decode(tokenizer, [i]) == "�"]
    text = "hello world, hello"
    token_ids = random.Random(1).choices(lone, k=500) + tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, token_ids)).lstrip("�").strip().endswith("world, hello")


def test_tokens_that_each_begin_the_next_character_lose_none() -> None:
    # In the byte-level alphabet "Ã" and "©" are the two bytes of "é".
    tokenizer = Tokenizer(models.WordLevel({"Ã": 0, "©Ã": 1, "©": 2}, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    parts = pieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [0, *[1] * 60, 2])
    assert "".join(parts) == "é" * 61
    assert sum(map(bool, parts)) >= 4


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_half_a_character_at_the_end_is_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = tokenizer.encode("a한", add_special_tokens=False)[:-1]
    assert "".join(pieces(tokenizer, token_ids)) == decode(tokenizer, token_ids)
    assert decode(tokenizer, token_ids).endswith("�")


def test_half_a_character_of_the_prompt_is_not_shown() -> None:
    token_ids = BYTE_LEVEL.encode("a👍", add_special_tokens=False)
    assert pieces(BYTE_LEVEL, [], prompt=tuple(token_ids[:3])) == [""]


@pytest.mark.parametrize("tail", range(4))
def test_garbage_in_any_amount_is_shown_whole(tail: int) -> None:
    lone = BYTE_LEVEL.convert_tokens_to_ids("ÿ")
    token_ids = [lone] * (100 + tail)
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == decode(BYTE_LEVEL, token_ids)


def test_cost_of_a_token_does_not_grow() -> None:
    lone = BYTE_LEVEL.convert_tokens_to_ids("ÿ")
    started_s = time.monotonic()
    assert set("".join(pieces(BYTE_LEVEL, [lone] * 20_000))) == {"�"}
    assert time.monotonic() - started_s < 10


def test_model_without_tokenizer_has_no_text() -> None:
    assert (make_decoder(None, (1, 2)).push(5), make_decoder(None).finish()) == ("", "")
