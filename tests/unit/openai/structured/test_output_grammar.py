"""Fields of a request become grammars, checked in threads of their own with a bound on every wait."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from replicas.errors import InvalidRequest, Overloaded
from replicas.text.grammar import GrammarCompiler
from serve_app.openai.request.schema import CompletionBody
from serve_app.openai.structured.output_grammar import MAX_COMPILATION_S, GrammarChecker, OutputGrammar, output_grammar
from testkit.limits import LIMIT_S, until
from tests.unit.openai.structured.test_chat_grammar import is_whole
from tests.unit.text.test_grammar import DEMO

SETS = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f", "<f="],
    "structures": [
        {"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"},
        {"begin": "<f=b>", "schema": SETS, "end": "</f>"},
    ],
}
TAGGED = ["text", "<f=a>1</f>", "x <f=b>[1, 2]</f> y <f=a>1</f>"], ["<f=a>2</f>", "<f=c>1</f>", "<f=a>1"]


def made(**fields: Any) -> OutputGrammar | None:
    return output_grammar(CompletionBody.model_validate({"model": "m", "prompt": "x", **fields}))


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}}


@pytest.mark.parametrize(
    ("fields", "param", "whole", "not_whole"),
    [
        (structured(json={"const": 1}), "structured_outputs.json", ["1"], ["2", "1 2"]),
        (structured(json='{"enum": [[1, 2]]}'), "structured_outputs.json", ["[1, 2]", "[1,2]"], ["[1]"]),
        (structured(json=json.dumps(True)), "structured_outputs.json", ["{}", "[1]", '"x"'], ["x"]),
        (
            structured(json={"enum": [[1, 2]]}, disable_any_whitespace=True),
            "structured_outputs.json",
            ["[1,2]"],
            ["[1, 2]"],
        ),
        (structured(json_object=True), "structured_outputs.json_object", ['{"a": [1]}', "{}"], ["[]", "1"]),
        (structured(regex="a+b|c"), "structured_outputs.regex", ["aab", "c"], ["a", "xc", "cc"]),
        (structured(choice=["one", 'a "b"']), "structured_outputs.choice", ["one", 'a "b"'], ["two", "on"]),
        (structured(grammar='start: "x" /[0-9]+/'), "structured_outputs.grammar", ["x12"], ["x"]),
        (structured(grammar='root ::= "a" | "b"+'), "structured_outputs.grammar", ["a", "bb"], ["ab"]),
        (structured(structural_tag=json.dumps(TAG)), "structured_outputs.structural_tag", *TAGGED),
        ({"response_format": TAG}, "response_format", *TAGGED),
        ({"response_format": {"type": "json_object"}}, "response_format", ["{}"], ["[]"]),
        (schema_format({"const": "é"}), "response_format.json_schema.schema", ['"é"'], ['"e"']),
    ],
)
def test_a_form_has_the_grammar_that_it_names(
    fields: dict[str, Any], param: str, whole: list[str], not_whole: list[str]
) -> None:
    grammar = made(**fields)
    assert grammar is not None and grammar.param == param
    assert [text for text in whole if not is_whole(grammar, text)] == []
    assert [text for text in not_whole if is_whole(grammar, text)] == []


def test_a_body_that_asks_for_nothing_has_no_grammar() -> None:
    assert made() is None and made(response_format={"type": "text"}) is None


def test_pointers_to_what_is_not_enforced_begin_where_the_schema_stands() -> None:
    for fields, pointers in (
        (schema_format(SETS), ("/uniqueItems",)),
        (structured(json={"items": SETS}), ("/items/uniqueItems",)),
        ({"response_format": TAG}, ("/structures/1/schema/uniqueItems",)),
        (structured(structural_tag=json.dumps(TAG)), ("/structures/1/schema/uniqueItems",)),
        (structured(regex="a"), ()),
    ):
        grammar = made(**fields)
        assert grammar is not None and grammar.not_enforced == pointers


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (structured(json="{"), "structured_outputs.json", "is not valid JSON"),
        (structured(json="[1]"), "structured_outputs.json", "must be a JSON Schema"),
        (structured(json="[" * 100_000), "structured_outputs.json", "is not valid JSON"),
        (structured(json={"type": "text"}), "structured_outputs.json", "Invalid type: text"),
        (structured(grammar="root ::= ("), "structured_outputs.grammar", "is neither Lark nor GBNF"),
        (structured(structural_tag="{}"), "structured_outputs.structural_tag", "is no structural tag"),
        (schema_format(SETS, strict=True), "response_format.json_schema.schema", "`/uniqueItems`"),
        (schema_format({"pattern": "("}), "response_format.json_schema.schema", "is no regular expression"),
        (
            {"response_format": TAG | {"structures": [{"begin": "<f=a>", "schema": {"type": "text"}, "end": "</f>"}]}},
            "response_format.structures[0].schema",
            "Invalid type: text",
        ),
    ],
)
def test_what_has_no_grammar_is_refused_by_its_field(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(**fields)
    assert caught.value.param == param and f"`{param}`" in str(caught.value) and reason in str(caught.value)


class HeldCompiler:
    """Compiler whose checks wait until their grammar is released."""

    def __init__(self) -> None:
        self.released: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.begun: list[str] = []

    def check(self, grammar: str, param: str) -> None:
        self.begun.append(grammar)
        assert self.released[grammar].wait(LIMIT_S)


class Later:
    """Clock of the running event loop, which can be set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now_s, self._ahead_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: self._now_s() + self._ahead_s)

    async def wait(self, seconds: float) -> None:
        self._ahead_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def held() -> AsyncIterator[HeldCompiler]:
    compiler = HeldCompiler()
    yield compiler
    for grammar in compiler.begun:
        compiler.released[grammar].set()


def checker_of(compiler: HeldCompiler) -> GrammarChecker:
    return GrammarChecker(cast(GrammarCompiler, compiler))


async def checks(checker: GrammarChecker, name: str, number: int) -> list[asyncio.Task[OutputGrammar | None]]:
    """Return checks that have begun to wait."""
    tasks = [asyncio.create_task(checker.checked(lambda: OutputGrammar(name, "field"))) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def test_a_grammar_is_checked_and_its_absence_is_not(held: HeldCompiler) -> None:
    checker = checker_of(held)
    held.released["a"].set()
    assert await checker.checked(lambda: None) is None and held.begun == []
    [check] = await checks(checker, "a", 1)
    assert await check == OutputGrammar("a", "field") and held.begun == ["a"]


async def test_what_cannot_be_compiled_names_its_field_and_counts() -> None:
    checker = GrammarChecker(GrammarCompiler(DEMO))
    with pytest.raises(InvalidRequest, match=r"`structured_outputs\.regex` cannot be enforced: .*group") as caught:
        await checker.checked(lambda: made(structured_outputs={"regex": "("}))
    assert caught.value.param == "structured_outputs.regex"
    for _ in range(3):
        assert await checker.checked(lambda: made(structured_outputs={"regex": "a"})) is not None
    counts = {metric.name: metric.value for metric in checker.metrics()}
    assert counts == {
        "headway:grammar_checks": 4,
        "headway:grammar_check_cache_hits": 2,
        "headway:grammar_check_cache_size": 1,
    }


async def test_only_a_compilation_that_is_long_itself_is_the_requests_fault(
    held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(monkeypatch)
    asked = await checks(checker_of(held), "slow", 5)
    await until(lambda: len(held.begun) == 2)
    await later.wait(MAX_COMPILATION_S + 1)
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in errors] == [InvalidRequest] * 2 + [Overloaded] * 3
    assert "takes more than 10 s to compile" in str(errors[0]) and "other requests" in str(errors[4])
    held.released["slow"].set()
    assert held.begun == ["slow"] * 2, "those that have left are not compiled"


async def test_a_grammar_whose_turn_comes_late_has_the_whole_limit_for_itself(
    held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, checker = Later(monkeypatch), checker_of(held)
    first = await checks(checker, "first", 2)
    await until(lambda: len(held.begun) == 2)
    [last] = await checks(checker, "last", 1)
    await later.wait(0.8 * MAX_COMPILATION_S)
    held.released["first"].set()
    await asyncio.gather(*first)
    await until(lambda: "last" in held.begun)
    await later.wait(0.8 * MAX_COMPILATION_S)
    assert not last.done()
    held.released["last"].set()
    assert await last == OutputGrammar("last", "field")


async def test_a_large_grammar_that_was_checked_before_is_neither_made_nor_compiled_again() -> None:
    checker, num_made = GrammarChecker(GrammarCompiler(DEMO)), 0

    def make() -> OutputGrammar | None:
        nonlocal num_made
        num_made += 1
        return made(structured_outputs={"regex": "a"})

    first = await checker.checked(make, key=b"a" * 2048)
    assert await checker.checked(make, key=b"a" * 2048) is first and num_made == 1
    assert await checker.checked(make, key=b"b" * 2048) == first and num_made == 2
    for key in (None, b"a", b"a"):
        await checker.checked(make, key=key)
    assert num_made == 5
    values = {metric.name: metric.value for metric in checker.metrics()}
    assert (values["headway:grammar_checks"], values["headway:grammar_check_cache_hits"]) == (6, 5)
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await checker.checked(lambda: made(structured_outputs={"regex": "("}), key=b"(" * 2048)
