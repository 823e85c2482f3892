"""Conversations that are tokenized by segments have the token ids of the whole text, and the cache has a bound."""

import random
import threading
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.openai.tokenize.bounded_cache import BoundedCache
from serve_app.openai.tokenize.segments import SegmentEncoder, segment_encoder, turn_marker

START, END = "<|im_start|>", "<|im_end|>"
CORPUS = ["hello world, how are you today? the quick brown fox jumps over the lazy dog\n ▁ user assistant wörld 👋"] * 4
PIECES = (
    START, END, START + "user\n", END + "\n", "<|im_", "start|>", "<|im_start", "hello", " world", "  ", "\n\n", "\t",
    "wörld", "👋", "e\u0301", "▁", "a" * 40, " ", "<tool>", "<|im_start|>assistant", "1234567", "\u200d", "x<|im_end|>",
)  # fmt: skip


def byte_level(add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"]))


def normalized() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    trainer = trainers.UnigramTrainer(vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    return trained(tokenizer, trainer)


def trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("<|im_start|>assistant", normalized=False)])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_level(False),
    "bytes with a space": lambda: byte_level(True),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "normalized": normalized,
}


@pytest.mark.parametrize("min_chars", [0, 40])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_token_ids_are_those_of_the_whole_text(name: str, min_chars: int) -> None:
    tokenizer, rng = TOKENIZERS[name](), random.Random(5)
    encoder, text = SegmentEncoder(tokenizer, START, 2**14, min_chars), ""
    for _ in range(300):
        # A conversation goes on, or another one begins.
        text = (text if rng.random() < 0.8 else "") + "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        (whole,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        assert list(encoder.encode(text, rng.choice(("a", "b")))) == whole.ids
        encoder.cache.check_invariants()
    assert encoder.cache.num_hits > 100


def test_the_marker_is_the_special_token_of_most_turns_that_nothing_can_overlap() -> None:
    def added(*tokens: AddedToken) -> dict[int, AddedToken]:
        return dict(enumerate(tokens))

    start, end = (AddedToken(token, special=True, normalized=False) for token in (START, END))
    text = f"{START}user\nhi{END}{START}assistant\n"
    assert turn_marker(text, added(start, end)) == START
    assert turn_marker("hi", added(start, end)) is None
    assert turn_marker(text, added(AddedToken(START, special=False), end)) == END
    assert turn_marker(text, added(AddedToken(START, special=True, lstrip=True), end)) == END
    assert turn_marker(text, added(start, end, AddedToken("\n<|im_start"))) == END
    assert turn_marker(text, added(start, AddedToken("a<|im_start|>"))) is None
    assert segment_encoder(byte_level(False), lambda: "no turns") is None
    assert segment_encoder(byte_level(False), lambda: text) is not None


def test_tenants_have_segments_of_their_own() -> None:
    encoder = SegmentEncoder(byte_level(False), START)
    for tenant, num_hits in (("a", 0), ("b", 0), ("a", 1)):
        encoder.encode(f"{START}user\n{'hi' * 600}{START}assistant\n", tenant)
        assert encoder.cache.num_hits == num_hits


def test_the_cache_keeps_what_was_used_last_within_its_bytes() -> None:
    cache: BoundedCache[int, str] = BoundedCache(30)
    for key in range(3):
        cache.put(key, str(key), 10)
    assert cache.get(0) == "0"
    cache.put(3, "3", 10)
    cache.put(4, "larger than all", 31)
    assert [cache.get(key) for key in range(5)] == ["0", None, "2", "3", None]
    cache.check_invariants()


def test_threads_share_a_cache() -> None:
    cache: BoundedCache[int, int] = BoundedCache(50)

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000):
            key = rng.randrange(30)
            assert cache.get(key) in (None, key)
            cache.put(key, key, 1 + key % 7)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check_invariants()
