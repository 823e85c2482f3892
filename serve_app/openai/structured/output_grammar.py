"""Grammar of an output, from `response_format` or `structured_outputs`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from replicas.errors import InvalidRequest, Overloaded
from replicas.protocol import Metric, MetricKind
from replicas.text.grammar import (
    GrammarCompiler,
    MarkedPart,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    structural_tag_grammar,
)
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.formats import JsonObjectFormat, JsonSchemaFormat, StructuralTag, StructuredOutputs
from serve_app.openai.request.schema import GenerationBody
from serve_app.openai.structured.json_schema import Schema, enforceable_schema
from serve_app.openai.tokenize.bounded_cache import BoundedCache
from serve_app.openai.tokenize.worker_threads import SERVER, WorkerThreads

MAX_COMPILATION_S = 10.0
"""Longest wait for a thread, and then for a grammar's compilation, seconds."""

_CHECKS = "grammars that were checked before their requests were accepted"
_CHECK_HITS = "checked grammars that were compiled before"
_CHECK_SIZE = "compiled grammars in the cache of the process that checks them"

_NUM_THREADS = 2
_MAX_CACHE_BYTES = 2**23
"""Most bytes of the grammars that were checked, with what they are made of."""
_ENTRY_BYTES = 512
"""Bytes of such a grammar in addition to its text and what it is made of."""
_MIN_KEY_BYTES = 2048
"""A grammar that is made of less is made again each time, which takes about a millisecond."""
_ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """Grammar of an output."""

    grammar: str
    """Grammar in llguidance's variant of Lark."""
    param: str
    """Field of the request that asks for it."""
    not_enforced: tuple[str, ...] = ()
    """JSON pointers to the keywords of the request's JSON Schema that the grammar does not enforce."""


class GrammarChecker:
    """Checker of the grammars that bodies ask for; it compiles them in threads of its own.

    A compilation cannot be ended. One that takes too long is refused, and occupies its thread until it ends.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = WorkerThreads(_NUM_THREADS, "grammars")
        self._checked_before: BoundedCache[bytes, OutputGrammar] = BoundedCache(_MAX_CACHE_BYTES)

    def metrics(self) -> tuple[Metric, ...]:
        """Return the number of checks and the counts of the cache of compiled grammars."""
        counts, num_hits = self._compiler.counts(), self._checked_before.num_hits
        return (
            Metric("headway:grammar_checks", _CHECKS, MetricKind.COUNTER, counts.num_requests + num_hits),
            Metric("headway:grammar_check_cache_hits", _CHECK_HITS, MetricKind.COUNTER, counts.num_hits + num_hits),
            Metric("headway:grammar_check_cache_size", _CHECK_SIZE, MetricKind.GAUGE, counts.size),
        )

    async def checked(
        self, make: Callable[[], OutputGrammar | None], owner: WorkOwner = SERVER, key: bytes | None = None
    ) -> OutputGrammar | None:
        """Return the grammar that `make` returns, which can be compiled; None if it returns none.

        `key` is what it is made of: a large one that was checked before is not made again. None: it is always made.

        Raises:
            InvalidRequest: as `make` raises, or the grammar cannot be compiled, or not in time.
            Overloaded: too much work waits, or all threads compile longer than that.
        """
        if key is not None and len(key) < _MIN_KEY_BYTES:
            key = None
        known = None if key is None else self._checked_before.get(key)
        if known is not None:
            return known
        loop, limit, has_begun = asyncio.get_running_loop(), asyncio.timeout(MAX_COMPILATION_S), asyncio.Event()

        def begin() -> None:
            has_begun.set()
            with contextlib.suppress(RuntimeError):  # The caller has left.
                limit.reschedule(loop.time() + MAX_COMPILATION_S)

        def check() -> OutputGrammar | None:
            loop.call_soon_threadsafe(begin)
            return self._checked(make)

        try:
            async with limit:
                grammar = await self._threads.run(check, owner)
        except TimeoutError:
            if not has_begun.is_set():
                message = f"the grammars of other requests have been compiled for {MAX_COMPILATION_S:g} s"
                raise Overloaded(message, MAX_COMPILATION_S, "preparation_wait") from None
            message = f"the grammar of the output takes more than {MAX_COMPILATION_S:g} s to compile; make it simpler"
            raise InvalidRequest(message) from None
        if key is not None and grammar is not None:
            self._checked_before.put(key, grammar, sys.getsizeof(key) + sys.getsizeof(grammar.grammar) + _ENTRY_BYTES)
        return grammar

    def _checked(self, make: Callable[[], OutputGrammar | None]) -> OutputGrammar | None:
        grammar = make()
        if grammar is not None:
            self._compiler.check(grammar.grammar, grammar.param)
        return grammar


def output_grammar(body: GenerationBody) -> OutputGrammar | None:
    """Return the grammar that a body asks for; None if it asks for none.

    Raises:
        InvalidRequest: there is no such grammar; the error names the field.
    """
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs)
    match body.response_format:
        case JsonObjectFormat():
            return _of_schema(_ANY_OBJECT, "response_format")
        case JsonSchemaFormat(json_schema=form):
            return _of_schema(form.schema_, "response_format.json_schema.schema", is_strict=form.strict)
        case StructuralTag() as tag:
            return _of_structural_tag(tag, "response_format")
        case _:
            return None


def _of_structured_outputs(outputs: StructuredOutputs) -> OutputGrammar:
    has_whitespace = not outputs.disable_any_whitespace
    if outputs.json_ is not None:
        param = "structured_outputs.json"
        return _of_schema(_schema_of(outputs.json_, param), param, has_whitespace=has_whitespace)
    if outputs.json_object:
        return _of_schema(_ANY_OBJECT, "structured_outputs.json_object", has_whitespace=has_whitespace)
    if outputs.regex is not None:
        return OutputGrammar(regex_grammar(outputs.regex), "structured_outputs.regex")
    if outputs.choice is not None:
        return OutputGrammar(choice_grammar(outputs.choice), "structured_outputs.choice")
    if outputs.grammar is not None:
        return OutputGrammar(lark_grammar(outputs.grammar, "structured_outputs.grammar"), "structured_outputs.grammar")
    assert outputs.structural_tag is not None
    param = "structured_outputs.structural_tag"
    try:
        return _of_structural_tag(StructuralTag.model_validate_json(outputs.structural_tag), param)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]
        message = f"`{param}` is no structural tag: {'.'.join(map(str, reason['loc']))} {reason['msg']}"
        raise InvalidRequest(message, param) from None


def _of_schema(
    schema: Schema | bool, param: str, *, is_strict: bool = False, has_whitespace: bool = True
) -> OutputGrammar:
    enforceable = enforceable_schema(schema, param, is_strict=is_strict, has_whitespace=has_whitespace)
    return OutputGrammar(json_schema_grammar(enforceable.schema), param, enforceable.not_enforced)


def _of_structural_tag(tag: StructuralTag, param: str) -> OutputGrammar:
    tags, not_enforced = [], []
    for index, structure in enumerate(tag.structures):
        trigger = max((prefix for prefix in tag.triggers if structure.begin.startswith(prefix)), key=len)
        enforceable = enforceable_schema(structure.schema_, f"{param}.structures[{index}].schema")
        tags.append(MarkedPart(trigger, structure.begin, enforceable.schema, structure.end))
        not_enforced += [f"/structures/{index}/schema{pointer}" for pointer in enforceable.not_enforced]
    return OutputGrammar(structural_tag_grammar(tags), param, tuple(not_enforced))


def _schema_of(value: Schema | str, param: str) -> Schema | bool:
    """Return a schema that may be given as its text."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"`{param}` is not valid JSON: {error}", param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema, an object", param)
    return schema
