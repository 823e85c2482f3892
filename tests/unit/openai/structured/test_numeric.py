"""Numbers: an output is within the bounds of its schema, and what is within them can be an output."""

import random
import re

import pytest

from replicas.errors import InvalidRequest
from replicas.text.grammar import GrammarConstraint, json_schema_grammar
from serve_app.openai.structured.json_schema import Schema
from testkit.json_schemas import documents_near, fault_of, random_numbers, without
from tests.unit.openai.structured.test_generated_schemas import CLOSING, COMPILER, enforced
from tests.unit.text.test_grammar import DEMO, allowed, request

MAX_TOKENS = 60


def constraint_of(schema: Schema) -> GrammarConstraint:
    return COMPILER.constraint_of(request(json_schema_grammar(schema)))


def takes(schema: Schema, text: str) -> bool:
    constraint = constraint_of(schema)
    try:
        constraint.accept_all(DEMO.encode(text, add_special_tokens=False))
    except ValueError:
        return False
    return constraint.is_complete or DEMO.eos_token_id in allowed(constraint)


def takes_number(schema: Schema, document: str) -> bool:
    """Return True if a grammar takes a document of one number, as it is or with zeros behind."""
    return any(takes(schema, re.sub(r"\.\d+", rf"\g<0>{'0' * num_zeros}", document)) for num_zeros in (*range(7), 20))


def random_output(schema: Schema, rng: random.Random) -> str | None:
    """Return a random output; None: it is longer than `MAX_TOKENS`, or has met a dead end of two schemas together."""
    constraint, token_ids = constraint_of(schema), list[int]()
    while len(token_ids) < MAX_TOKENS and not constraint.is_complete:
        choices = allowed(constraint)
        if not choices and "allOf" in schema:
            return None
        if DEMO.eos_token_id in choices:
            if rng.random() < 0.5:
                break
            choices.remove(DEMO.eos_token_id)
        closing = [token_id for token_id in choices if token_id in CLOSING]
        token_ids.append(rng.choice(closing if closing and rng.random() < 0.3 else choices))
        constraint.accept(token_ids[-1])
    return DEMO.decode(token_ids) if len(token_ids) < MAX_TOKENS else None


def check(rng: random.Random, num_outputs: int) -> tuple[int, int]:
    """Check a random schema; return the number of outputs, and of documents that the grammar takes."""
    schema = random_numbers(rng)
    documents = documents_near(schema, rng)
    found = enforced(schema, is_strict=False)
    if isinstance(found, InvalidRequest):
        valid = [document for document in documents if fault_of(document, schema) is None]
        assert not valid, f"{schema} {found}: {valid}"
        return 0, 0
    rest = without(schema, found.not_enforced)
    valid = [document for document in documents if fault_of(document, rest) is None]
    refused = [document for document in valid if not takes_number(found.schema, document)]
    # Multiples have a fixed number of decimals in a grammar, and not all of them are written so.
    assert not refused or ("multipleOf" in str(schema) and refused != valid), f"{schema} -> {found}: {refused}"
    outputs = [output for _ in range(num_outputs) if (output := random_output(found.schema, rng)) is not None]
    for output in outputs:
        fault = fault_of(output, rest)
        assert fault is None, f"{schema} -> {found}: {output} {fault}"
    return len(outputs), len(valid)


def test_numbers_meet_their_schema_and_are_not_narrowed() -> None:
    rng = random.Random(5)
    counts = [check(rng, 3) for _ in range(60)]
    assert sum(num_outputs for num_outputs, _ in counts) > 80 and sum(num_valid for _, num_valid in counts) > 150


@pytest.mark.deep
def test_many_numbers_meet_their_schema_and_are_not_narrowed() -> None:
    rng, num_outputs = random.Random(), 0
    while num_outputs < 20_000:
        num_outputs += check(rng, 20)[0]
