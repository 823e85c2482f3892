"""An output parsed in pieces gives what it gives as a whole, for every split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.openai.tools.families import ChatFamily
from serve_app.openai.tools.shapes.calls import Call
from tests.unit.openai.tools.cases import CALLS, HARD_TEXT, REASONED, answer_text, parse, reasoning_text

EXAMPLES = 20
XML = ("qwen3_coder", "glm45", "seed_oss", "minimax_m2", "minimax_m3")
"""Families whose texts do not say what is a string; the schema does."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def outputs(draw: st.DrawFn, family: ChatFamily) -> str:
    """Text of fragments that a model of the family may write, and of fragments of these."""
    calls = family.calls.write(CALLS)
    fragments = [
        *family.markers,
        calls,
        family.calls.write([Call("now", {})]),
        reasoning_text(family, "think"),
        answer_text(family, "Yes.\n"),
        HARD_TEXT,
        *("{", "}", "[", "]", '"', ",", ":", ";", "\\", "\n", " ", "=", "(", ")", "name", '"arguments"', "<", ">", "/"),
    ]
    pieces = st.sampled_from(fragments) | st.text("ab<{[\"'\\}]> \n", max_size=4)
    text = "".join(draw(st.lists(pieces, max_size=8)))
    cut = draw(st.integers(0, len(calls)))
    return draw(st.sampled_from([text, calls[:cut] + text, text + calls[cut:], text + calls[:cut]]))


@st.composite
def splits(draw: st.DrawFn) -> tuple[ChatFamily, str, list[str]]:
    family = draw(st.sampled_from(REASONED))
    text = draw(outputs(family))
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    bounds = list(zip([0, *places], [*places, len(text)], strict=True))
    return family, text, draw(st.sampled_from([[text[begin:end] for begin, end in bounds], list(text)]))


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(splits(), st.booleans(), st.booleans())
def test_a_split_text_is_parsed_as_the_whole_one(
    case: tuple[ChatFamily, str, list[str]], in_reasoning: bool, whole_calls: bool
) -> None:
    check_split(case, in_reasoning, whole_calls)


@pytest.mark.deep
@settings(max_examples=10_000, deadline=None)
@given(splits(), st.booleans(), st.booleans())
def test_many_split_texts_are_parsed_as_the_whole_ones(
    case: tuple[ChatFamily, str, list[str]], in_reasoning: bool, whole_calls: bool
) -> None:
    check_split(case, in_reasoning, whole_calls)


def check_split(case: tuple[ChatFamily, str, list[str]], in_reasoning: bool, whole_calls: bool) -> None:
    family, text, pieces = case
    whole = parse(family, [text], in_reasoning=in_reasoning, whole_calls=whole_calls)
    assert parse(family, pieces, in_reasoning=in_reasoning, whole_calls=whole_calls) == whole


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(REASONED), st.text(), st.integers(1, 5))
def test_text_without_markers_comes_back_whole(family: ChatFamily, text: str, step: int) -> None:
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    parsed = parse(family, pieces)
    assert parsed.content == text and parsed.names == []


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from([family for family in REASONED if family.name not in XML]),
    st.dictionaries(st.text("abc_", min_size=1, max_size=5).map("x{}".format), json_values, max_size=3),
)
def test_any_arguments_are_read_as_they_were_written(family: ChatFamily, arguments: dict[str, object]) -> None:
    text = family.calls.write([Call("now", arguments)])
    assert parse(family, list(text), whole_calls=True).calls == [("now", arguments)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from([family for family in REASONED if family.name in XML]), st.text(), st.integers())
def test_any_text_between_tags_is_read_as_it_was_written(family: ChatFamily, city: str, days: int) -> None:
    arguments = {"city": city, "days": days}
    text = family.calls.write([Call("get_weather", arguments)])
    assert parse(family, list(text)).calls == [("get_weather", arguments)]
