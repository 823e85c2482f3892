"""Grammars are compiled once, followed token by token as far as limits allow, and replayed from the tokens alone."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import replicas.text.grammar as module
from replicas.errors import InvalidRequest, SequenceFailed
from replicas.protocol import GenerateRequest, SamplingParams
from replicas.text.grammar import (
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    GrammarConstraint,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
    schema_options,
)
from replicas.text.tokenizer_files import load_tokenizer

DEMO = load_tokenizer(str(Path(module.__file__).parents[1] / "demo"))
AMBIGUOUS = 'start: s\ns: s s | "a" | s s s'
EXHAUSTING = regex_grammar(r"(\w+\s*){1,1000}")
OBJECT = json_schema_grammar(
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
    | schema_options()
)


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DEMO)


def request(grammar: str, output: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest("r", (1,), SamplingParams(max_tokens=9, grammar=grammar), output_token_ids=output)


def counts(compiler: GrammarCompiler) -> dict[str, float]:
    return {metric.name.removeprefix("headway:grammar_"): metric.value for metric in compiler.metrics()}


def allowed(constraint: GrammarConstraint, num_bits: int = len(DEMO)) -> list[int]:
    mask = np.full(-(-num_bits // 32) * 4, 0xFF, np.uint8)
    constraint.fill_mask(mask.data)
    return [int(bit) for bit in np.flatnonzero(np.unpackbits(mask, bitorder="little")[:num_bits])]


WORDS = [set(DEMO.decode([token_id])) for token_id in range(len(DEMO))]


def walk(constraint: GrammarConstraint, letters: str, num_tokens: int, seed: int = 0) -> list[int]:
    """Accept random tokens of these letters until the constraint is complete or has an error; return them."""
    rng = random.Random(seed)
    taken: list[int] = []
    with contextlib.suppress(ValueError):
        while len(taken) < num_tokens and not constraint.is_complete and constraint.error is None:
            known = allowed(constraint)
            taken.append(rng.choice([one for one in known if WORDS[one] and WORDS[one] <= set(letters)] or known))
            constraint.accept(taken[-1])
    return taken


def ids(text: str) -> tuple[int, ...]:
    return tuple(DEMO.encode(text, add_special_tokens=False))


def test_a_grammar_is_compiled_once_and_the_cache_is_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHE_SIZE", 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.constraint_of(request(choice_grammar([text])))
    assert counts(compiler) == {"requests": 6, "cache_hits": 2, "cache_size": 2}, "the least recently used one goes"


def test_output_is_replayed_in_the_middle_of_a_string(compiler: GrammarCompiler) -> None:
    whole = ids('{"a": "näive \\" text 東京", "b": -12')
    for length in range(len(whole) + 1):
        step_by_step = compiler.constraint_of(request(OBJECT))
        for token_id in whole[:length]:
            step_by_step.accept(token_id)
        replayed = compiler.constraint_of(request(OBJECT, whole[:length]))
        assert allowed(replayed) == allowed(step_by_step) and not replayed.is_complete
    with pytest.raises(SequenceFailed, match="the output so far cannot be followed"):
        compiler.constraint_of(request(OBJECT, whole[1:]))


def test_it_is_complete_when_only_the_end_may_follow(compiler: GrammarCompiler) -> None:
    constraint = compiler.constraint_of(request(OBJECT, ids('{"a": "", "b": 1')))
    assert not constraint.is_complete, "another digit may follow"
    constraint.accept(ids("}")[0])
    assert constraint.is_complete and constraint.error is None
    open_end = compiler.constraint_of(request(regex_grammar("a*"), ids("a")))
    assert not open_end.is_complete and DEMO.eos_token_id in allowed(open_end)
    open_end.accept(DEMO.eos_token_id)
    assert open_end.is_complete, "the end token ends it, also with `ignore_eos`"


def test_a_wrong_token_is_an_error_that_stays(compiler: GrammarCompiler) -> None:
    constraint = compiler.constraint_of(request(OBJECT))
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        constraint.accept(ids("}")[0])
    with pytest.raises(ValueError):
        constraint.accept(ids("{")[0])
    assert constraint.error is not None
    assert compiler.constraint_of(request(OBJECT, ids("{"))).error is None, "other sequences go on"


@pytest.mark.parametrize(("num_logits", "is_cut"), [(100, True), (len(DEMO), False), (len(DEMO) + 77, False)])
def test_a_mask_has_the_length_of_the_logits(num_logits: int, is_cut: bool) -> None:
    constraint = GrammarCompiler(DEMO, num_logits).constraint_of(request(regex_grammar("[a-z]+")))
    whole = allowed(GrammarCompiler(DEMO).constraint_of(request(regex_grammar("[a-z]+"))))
    assert allowed(constraint, num_logits) == [token_id for token_id in whole if not is_cut or token_id < num_logits]
    assert allowed(constraint, 2 * len(DEMO)) == whole, "rows beyond the vocabulary are no tokens"


@pytest.mark.parametrize("grammar", [
    "start: (", "nonsense", 'start: "\ud800"', 'start: %json {"type": "text"}', "start: /(?=a)/", "start: start",
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused_by_name(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(InvalidRequest, match=r"`field` cannot be enforced: .{8}") as caught:
        compiler.check(grammar, "field")
    assert caught.value.param == "field"


def test_the_length_of_a_grammar_is_bounded(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=f"`field` .*at most {MAX_GRAMMAR_BYTES} are accepted"):
        compiler.check("x" * (MAX_GRAMMAR_BYTES + 1), "field")


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {f"p{number}": {} for number in range(600)}},
    {"anyOf": [{"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in range(1500)]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
])  # fmt: skip
def test_a_grammar_that_fails_at_its_first_tokens_is_refused(compiler: GrammarCompiler, schema: object) -> None:
    assert isinstance(schema, dict)
    with pytest.raises(InvalidRequest, match=r"too many alternatives or optional properties|no output meets it"):
        compiler.check(json_schema_grammar(schema | schema_options()), "field")


def test_two_hundred_optional_properties_are_accepted(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(200)}} | schema_options()
    compiler.check(json_schema_grammar(schema), "field")


def test_an_ambiguous_grammar_ends_at_a_limit(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUDGET_S", 0.2)
    compiler.check(AMBIGUOUS, "field")
    constraint = compiler.constraint_of(request(AMBIGUOUS))
    walk(constraint, "a", 1000)
    assert constraint.error is not None and ("alternatives" in constraint.error or "more than" in constraint.error)
    with pytest.raises(ValueError, match=r"too many alternatives|takes more than"):
        constraint.accept(ids("a")[0])


def test_a_sequence_has_a_budget_of_processor_time(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = compiler.constraint_of(request(OBJECT))
    monkeypatch.setattr(module, "_BUDGET_S", 0.0)
    monkeypatch.setattr(module, "_BUDGET_PER_TOKEN_S", 0.0)
    allowed(constraint)
    assert constraint.error is not None and "takes more than" in constraint.error
    monkeypatch.setattr(module, "_BUDGET_S", 9.0)
    with pytest.raises(ValueError, match="takes more than"):
        constraint.accept(ids("{")[0])


def test_a_sequence_that_exhausts_the_shared_lexer_ends_no_other(compiler: GrammarCompiler) -> None:
    beside = compiler.constraint_of(request(EXHAUSTING, ids("some words")))
    before = allowed(beside)
    exhausting = compiler.constraint_of(request(EXHAUSTING))
    walk(exhausting, "abcdefgh ", 1000)
    assert exhausting.error is not None and "too complex" in exhausting.error
    assert allowed(beside) == before and beside.error is None
    beside.accept(ids(" go")[0])
    assert beside.error is None
    assert compiler.constraint_of(request(EXHAUSTING, ids("some words"))).error is None, "the cache lets go of it"


def test_threads_share_a_compiler(compiler: GrammarCompiler) -> None:
    outputs: list[list[int]] = []
    expected = [walk(compiler.constraint_of(request(OBJECT)), '{}":, ab01\n', 40, seed) for seed in range(4)]

    def run(seed: int) -> None:
        outputs.append(walk(GrammarCompiler.constraint_of(compiler, request(OBJECT)), '{}":, ab01\n', 40, seed))

    threads = [threading.Thread(target=run, args=(number % 4,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == sorted(expected * 2)


def test_an_unreadable_tokenizer_refuses_only_grammars() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    compiler = GrammarCompiler(PreTrainedTokenizerFast(tokenizer_object=words))
    with pytest.raises(InvalidRequest, match="`field` cannot be enforced: the model's tokenizer has no grammars"):
        compiler.check(OBJECT, "field")
    with pytest.raises(InvalidRequest, match="the model's tokenizer has no grammars"):
        compiler.constraint_of(request(OBJECT))


def test_the_end_tokens_may_be_missing_or_unknown() -> None:
    constraint = GrammarCompiler(DEMO, eos_token_ids=(2, 99999)).constraint_of(request(regex_grammar("a*")))
    assert 2 in allowed(constraint) and 0 not in allowed(constraint)
    compiler = GrammarCompiler(DEMO, len(DEMO) - 50)
    compiler.check(OBJECT, "field")


def test_no_output_has_a_token_that_the_model_lacks() -> None:
    """Text that an added token would write is written with the model's own tokens, or has no grammar."""
    tokenizer = copy.deepcopy(DEMO)
    num_logits = len(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    assert tokenizer.encode("<extra>", add_special_tokens=False) == [num_logits]
    constraint = GrammarCompiler(tokenizer, num_logits).constraint_of(request(choice_grammar(["a<extra>b"])))
    text = ""
    while not constraint.is_complete:
        forced = constraint.forced_token_id()
        token_id = allowed(constraint, num_logits)[0] if forced is None else forced
        assert token_id < num_logits
        constraint.accept(token_id)
        text += tokenizer.decode([token_id])
    assert text == "a<extra>b"


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_token_is_the_only_one_that_the_mask_allows(compiler: GrammarCompiler, seed: int) -> None:
    constraint, rng, num_forced = compiler.constraint_of(request(OBJECT)), random.Random(seed), 0
    while not constraint.is_complete:
        forced, known = constraint.forced_token_id(), allowed(constraint)
        if forced is not None:
            assert known == [forced]
            num_forced += 1
        constraint.accept(rng.choice([token_id for token_id in known if WORDS[token_id] <= set('ab12":,{} ')] or known))
    assert num_forced > 0 and constraint.forced_token_id() is None
