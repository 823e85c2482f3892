"""Any schema: it is refused with its keyword, or what a grammar lets through is a document of it."""

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from bench.structured.structured_outputs import reason_of
from replicas.errors import InvalidRequest
from replicas.text.grammar import GrammarCompiler, GrammarConstraint, json_schema_grammar
from serve_app.openai.structured.json_schema import EnforceableSchema, Schema, enforceable_schema
from testkit.json_schemas import fault_of, without
from testkit.schema_strategies import schemas
from tests.unit.text.test_grammar import DEMO, allowed, request

COMPILER = GrammarCompiler(DEMO)
MAX_TOKENS = 80
CLOSING = {token_id for token_id in range(len(DEMO)) if DEMO.decode([token_id]) in ('"', "}", "]")}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schemas(), st.booleans(), st.integers(0, 2**31))
def test_a_schema_is_refused_by_its_keyword_or_enforced(schema: Schema, is_strict: bool, seed: int) -> None:
    check(schema, is_strict, seed)


@pytest.mark.deep
@settings(max_examples=1000, deadline=None)
@given(schemas(max_leaves=16), st.booleans(), st.integers(0, 2**31))
def test_many_schemas_are_refused_by_their_keyword_or_enforced(schema: Schema, is_strict: bool, seed: int) -> None:
    check(schema, is_strict, seed)


def check(schema: Schema, is_strict: bool, seed: int) -> None:
    found = enforced(schema, is_strict)
    if isinstance(found, InvalidRequest):
        event("refused")
        assert found.param == "field" and reason_of(str(found), schema) is not None, str(found)
        return
    assert not (is_strict and found.not_enforced)
    text = document_of(found, random.Random(seed))
    event("cut" if text is None else "whole")
    if text is not None:
        assert fault_of(text, without(schema, found.not_enforced)) is None, text


def enforced(schema: Schema, is_strict: bool) -> EnforceableSchema | InvalidRequest:
    """Return the schema as far as it can be enforced, or why it cannot be."""
    try:
        found = enforceable_schema(schema, "field", is_strict=is_strict)
        COMPILER.check(json_schema_grammar(found.schema), "field")
    except InvalidRequest as error:
        return error
    return found


def document_of(found: EnforceableSchema, rng: random.Random) -> str | None:
    """Return a random document that the grammar lets through; None: it is longer than `MAX_TOKENS`."""
    constraint: GrammarConstraint = COMPILER.constraint_of(request(json_schema_grammar(found.schema)))
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS and not constraint.is_complete:
        choices = allowed(constraint)
        if DEMO.eos_token_id in choices:
            break
        closing = [token_id for token_id in choices if token_id in CLOSING]
        token_ids.append(rng.choice(closing if closing and rng.random() < 0.5 else choices))
        constraint.accept(token_ids[-1])
    return DEMO.decode(token_ids) if len(token_ids) < MAX_TOKENS else None
