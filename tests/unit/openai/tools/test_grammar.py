"""Grammars of every family: they take valid calls and refuse others, with special tokens and without."""

import json
import random
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from serve_app.openai.tools.families import ChatFamily, family_named
from serve_app.openai.tools.grammar import CallRule, Thinking, answer_grammar, call_grammar, thinking_of
from serve_app.openai.tools.shapes.calls import Call, Tool
from serve_app.openai.tools.shapes.shape import Marker, marker_of, special_token_ids
from tests.unit.openai.tools.cases import REASONED, TOOLS, can_call_in_parallel, parse

TOKENIZER = Path(__file__).resolve().parents[4] / "replicas" / "demo" / "tokenizer.json"
SHAPES = {family.calls: family for family in reversed(REASONED)}.values()
EVERY = pytest.mark.parametrize("family", SHAPES, ids=lambda family: family.name)
SPECIAL = pytest.mark.parametrize("has_special", [False, True], ids=["text", "special"])
QUICK = ((False, True, Thinking.OPTIONAL), (True, True, Thinking.OPEN), (True, False, Thinking.NONE))
CASES = pytest.mark.parametrize(
    ("has_special", "parallel", "thinking"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.deep])
        for case in product((False, True), (False, True), Thinking)
    ],
)
NO_TEXT = ("qwen3_coder", "glm45", "seed_oss", "minimax_m2", "deepseek_v32")
ONE = Call("get_weather", {"city": 'Zürich "x" 東京 {[', "days": -3})
WRONG = (
    Call("get_weather", {"days": 3}),
    Call("get_weather", {"city": "x", "days": "many"}),
    Call("get_weather", {"city": "x", "other": 1}),
    Call("unknown", {"city": "x"}),
)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokenizer of the demo model, with a family's markers as special tokens or without."""

    tokenizer: Tokenizer
    llguidance: LLTokenizer
    marker: Marker

    def takes(self, grammar: str, text: str) -> bool:
        """Return True if the text is a whole output of the grammar."""
        matcher = compiled(self, grammar).deep_copy()
        token_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def random_text(self, grammar: str, rng: random.Random) -> str:
        """Return an output of random tokens that the grammar allows, which ends as soon as it may."""
        matcher = compiled(self, grammar).deep_copy()
        token_ids: list[int] = []
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(self.llguidance.vocab_size) if mask[i // 8] >> (i % 8) & 1]
            token_ids.append(rng.choice(allowed))
            assert matcher.consume_token(token_ids[-1])
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


@cache
def compiled(words: Vocabulary, grammar: str) -> LLMatcher:
    assert not LLMatcher.validate_grammar(grammar, words.llguidance), grammar
    return LLMatcher(words.llguidance, grammar)


@cache
def vocabulary(family: ChatFamily, has_special: bool) -> Vocabulary:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    reasoning = family.reasoning
    assert reasoning
    text = family.calls.write([Call("f", {"a": 1}, "i")]) + " ".join(family.markers)
    text += reasoning.turn_begin + reasoning.answer_begin
    markers = sorted(
        set(re.findall(r"｜DSML｜|\]<\]minimax\[>\[|(?<!\[>\[)<(?!/?｜DSML)[|｜/]?[^<>=\s\"]*>|\[/?[A-Z_]+\]", text))
    )
    if has_special:
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    added = {token.content: (i, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
    end = tokenizer.token_to_id("<|im_end|>")
    return Vocabulary(tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=end), marker_of(special_token_ids(added)))


def thought(family: ChatFamily, thinking: Thinking) -> str:
    """Return reasoning that a grammar leaves free, up to the call or answer."""
    reasoning = family.reasoning
    assert reasoning
    if thinking is Thinking.NONE:
        return ""
    begin = "" if thinking is Thinking.OPEN else reasoning.begin
    return f'{begin}Hm. {{"name": [x\n{reasoning.end}{reasoning.turn_begin or chr(10) * 2}'


@pytest.mark.sampled(32)
@EVERY
@CASES
def test_required_calls_are_valid_and_nothing_else_is(
    family: ChatFamily, has_special: bool, parallel: bool, thinking: Thinking
) -> None:
    words = vocabulary(family, has_special)
    grammar = call_grammar(family, TOOLS, CallRule(is_required=True, parallel=parallel), words.marker, thinking)
    head = thought(family, thinking)
    assert words.takes(grammar, head + family.calls.write([ONE]))
    assert words.takes(grammar, family.calls.write([ONE])) == (thinking is not Thinking.OPEN)
    several = family.calls.write([ONE, Call("add", {"xs": [1, 2.5]})])
    assert words.takes(grammar, head + several) == (parallel and can_call_in_parallel(family))
    for wrong in WRONG:
        assert not words.takes(grammar, head + family.calls.write([wrong]))
    for text in ("", "I cannot.", family.calls.write([ONE])[:-4]):
        assert not words.takes(grammar, head + text)


@pytest.mark.sampled(32)
@EVERY
@CASES
def test_text_is_free_until_a_call_begins(
    family: ChatFamily, has_special: bool, parallel: bool, thinking: Thinking
) -> None:
    words = vocabulary(family, has_special)
    grammar = call_grammar(family, TOOLS, CallRule(is_required=False, parallel=parallel), words.marker, thinking)
    head = thought(family, thinking)
    answer = family.reasoning.answer_begin if family.reasoning else ""
    assert words.takes(grammar, f"{head}{answer}No call: x [1, 2] {{}}.\n")
    assert words.takes(grammar, head + family.calls.write([ONE]))
    for wrong in WRONG:
        assert not words.takes(grammar, head + family.calls.write([wrong]))
    if family.calls.begin and not answer:
        assert words.takes(grammar, f"{head}I call: {family.calls.write([ONE])}")
        assert not words.takes(grammar, f"{head}I call: {family.calls.begin} something")
        twice = f"{head}{family.calls.write([ONE])} again {family.calls.write([ONE])}"
        assert words.takes(grammar, twice) == parallel


@pytest.mark.sampled(16)
@EVERY
@SPECIAL
def test_a_named_function_is_called_once(family: ChatFamily, has_special: bool) -> None:
    words = vocabulary(family, has_special)
    grammar = call_grammar(family, TOOLS[:1], CallRule(is_required=True, parallel=False), words.marker)
    assert words.takes(grammar, family.calls.write([ONE]))
    assert not words.takes(grammar, family.calls.write([Call("add", {"xs": []})]))
    assert not words.takes(grammar, family.calls.write([ONE, ONE]))


@pytest.mark.sampled(16)
@EVERY
def test_a_tool_without_a_schema_takes_any_object(family: ChatFamily) -> None:
    words = vocabulary(family, has_special=True)
    grammar = call_grammar(family, [Tool("now")], CallRule(is_required=True), words.marker)
    for arguments in ({}, {"a": "x"}, {"a": 1, "b": {"c": [2]}}):
        assert words.takes(grammar, family.calls.write([Call("now", arguments)]))


@pytest.mark.sampled(16)
@EVERY
def test_optional_arguments_may_be_left_out_in_any_number(family: ChatFamily) -> None:
    number = {"type": "integer"}
    tool = Tool("f", {"type": "object", "properties": dict.fromkeys("abcd", number), "required": ["c"]})
    words = vocabulary(family, has_special=True)
    grammar = call_grammar(family, [tool], CallRule(is_required=True), words.marker)
    for names, is_valid in {
        "c": True,
        "ac": True,
        "bcd": True,
        "abcd": True,
        "cd": True,
        "": False,
        "abd": False,
    }.items():
        text = family.calls.write([Call("f", dict.fromkeys(names, 1))])
        assert words.takes(grammar, text) == is_valid, text


@pytest.mark.sampled(32)
@EVERY
@SPECIAL
@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_grammar_lets_through_is_parsed_as_valid_calls(
    family: ChatFamily, has_special: bool, seed: int
) -> None:
    properties = {
        "unit": {"enum": ["C", "F", 'it\'s "hot"']},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
    }
    schema = {"type": "object", "properties": properties, "required": ["days"], "additionalProperties": False}
    words = vocabulary(family, has_special)
    grammar = call_grammar(family, [Tool("f", schema), Tool("g", schema)], CallRule(is_required=True), words.marker)
    text = words.random_text(grammar, random.Random(seed))
    parsed = parse(family, list(text), tools=[Tool("f", schema), Tool("g", schema)])
    assert (parsed.content, parsed.num_malformed) == ("", 0) and parsed.names, text
    for name, arguments in parsed.calls:
        assert name in ("f", "g")
        jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("name", NO_TEXT)
def test_strings_between_tags_are_bound_by_their_enumeration_alone(name: str) -> None:
    family = next(family for family in REASONED if family.name == name)
    properties = {"unit": {"enum": ["C", "F"]}, "city": {"type": "string", "minLength": 3}, "n": {"minimum": 2}}
    tool = Tool("f", {"type": "object", "properties": properties, "required": ["unit"]})
    words = vocabulary(family, has_special=False)
    grammar = call_grammar(family, [tool], CallRule(is_required=True), words.marker)
    assert words.takes(grammar, family.calls.write([Call("f", {"unit": "C", "city": "a"})]))
    assert not words.takes(grammar, family.calls.write([Call("f", {"unit": "K", "city": "abc"})]))
    assert family.calls.unenforced(tool) == ("/properties/city/minLength", "/properties/n/minimum")


@SPECIAL
@pytest.mark.parametrize("name", ["gemma4", "minimax_m3"])
def test_values_within_values_follow_their_schema_as_far_as_it_can_be_expressed(name: str, has_special: bool) -> None:
    family = next(family for family in REASONED if family.name == name)
    point = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "required": ["x"]}
    properties = {
        "points": {"type": "array", "items": point, "minItems": 1, "maxItems": 2},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "unit": {"enum": ["C", 1, None]},
        "open": {},
        "two words": {"type": "boolean"},
        "parts": {"type": "array", "items": {"type": "string", "pattern": "^a"}, "minItems": 1000},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["k"]},
        "none": {"type": "object", "additionalProperties": False},
    }
    tool = Tool("f", {"type": "object", "properties": properties, "minProperties": 1})
    words = vocabulary(family, has_special)
    grammar = call_grammar(family, [tool], CallRule(is_required=True), words.marker)
    nested = {"k": [None, {"l": "m"}]} if has_special or name == "gemma4" else "text"
    taken: list[dict[str, Any]] = [
        {"points": [{"x": 1}, {"x": -5}], "either": None, "unit": 1, "open": nested},
        {"either": "long text {", "unit": "C", "two words": True, "parts": [], "map": {"k": 1}, "none": {}},
        {},
    ]
    refused: list[dict[str, Any]] = [
        {"points": []},
        {"points": [{"x": 1}] * 3},
        {"points": [{"x": 10}]},
        {"points": [{}]},
        {"unit": "K"},
    ]
    refused += [{"map": {"k": "x"}}, {"none": {"a": 1}}, {"unknown": 1}]
    for arguments, is_taken in [*((each, True) for each in taken), *((each, False) for each in refused)]:
        text = family.calls.write([Call("f", arguments)])
        assert words.takes(grammar, text) == is_taken, text
        assert parse(family, list(text), tools=[tool]).calls == [("f", arguments)]
    assert family.calls.unenforced(tool) == (
        "/minProperties",
        "/properties/either/anyOf/0/maxLength",
        "/properties/parts/minItems",
        "/properties/parts/items/pattern",
        "/properties/map/required",
    )


def test_constants_of_a_pythonic_call_are_pythons() -> None:
    family = family_named("lfm2")
    properties = {"on": {"type": "boolean"}, "unit": {"type": ["string", "null"]}, "mode": {"enum": ["a", True]}}
    words = vocabulary(replace(family, reasoning=REASONED[1].reasoning), has_special=True)
    tool = Tool("f", {"type": "object", "properties": properties})
    grammar = call_grammar(family, [tool], CallRule(is_required=True), words.marker)
    for arguments in ({"on": True, "unit": None, "mode": True}, {"on": False, "unit": "C", "mode": "a"}):
        assert words.takes(grammar, family.calls.write([Call("f", arguments)]))
    assert not words.takes(grammar, family.calls.write([Call("f", {"on": 1})]))


def test_a_name_that_is_no_python_name_is_refused_by_name() -> None:
    words = vocabulary(REASONED[1], has_special=False)
    for tool in (Tool("get-weather"), Tool("f", {"properties": {"a b": {}}})):
        with pytest.raises(ValueError, match=r"`(get-weather|a b)` is no name"):
            call_grammar(family_named("pythonic"), [tool], CallRule(is_required=True), words.marker)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ["hermes", "harmony", "command_r", "mistral", "seed_oss"])
@SPECIAL
@pytest.mark.parametrize("thinking", list(Thinking))
def test_a_grammar_binds_the_answer_and_not_the_thinking(name: str, has_special: bool, thinking: Thinking) -> None:
    family = next(family for family in REASONED if family.name == name)
    words = vocabulary(family, has_special)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for inner in (f"start: %json {json.dumps(schema)}", '%llguidance {}\nstart: X | y\nX: "{\\"a\\": 1}"\ny: "2" X\n'):
        grammar = answer_grammar(family, inner, words.marker, thinking)
        head = thought(family, thinking) + (family.reasoning.answer_begin if family.reasoning else "")
        assert words.takes(grammar, head + '{"a": 1}')
        assert not words.takes(grammar, head + '{"b": 1}')
        assert not words.takes(grammar, head + "text")


def test_the_thinking_follows_from_the_end_of_the_prompt() -> None:
    hermes = next(family for family in REASONED if family.name == "hermes")
    assert thinking_of(hermes, "<|im_start|>assistant\n<think>\n") is Thinking.OPEN
    assert thinking_of(hermes, "<|im_start|>assistant\n") is Thinking.OPTIONAL
    assert thinking_of(hermes, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is Thinking.NONE
    assert thinking_of(replace(hermes, reasoning=None), "<think>") is Thinking.NONE
    assert thinking_of(family_named("harmony"), "<|end|><|start|>assistant") is Thinking.OPTIONAL


def test_special_tokens_are_those_that_llguidance_takes_for_special() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    plain = ["<plain>", "[abc]", "<|x|>", "<｜tool▁sep｜>", "</plain>", "<open"]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ["[SP]", "word"]])
    added = {token.content: (i, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
    llguidance = LLTokenizer(tokenizer.to_str())
    found = special_token_ids(added)
    for token, (token_id, _) in added.items():
        assert llguidance.is_special_token(token_id) == (token in found), token
