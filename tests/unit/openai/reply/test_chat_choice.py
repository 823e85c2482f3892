"""A chat's choice that ends anywhere within its calls: deltas give what the message has, and what is cut says so."""

import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from replicas.protocol import FinishReason, TokenDelta, Usage
from serve_app.openai.reply.chat_choice import ChatChoice, part_of
from serve_app.openai.tokenize.prompt_tokenizer import TokenText
from serve_app.openai.tools.families import FAMILIES, ChatFamily, family_named
from serve_app.openai.tools.parser import OutputParser
from tests.unit.openai.reply.test_reasoning_usage import byte_tokenizer
from tests.unit.openai.tools.cases import CALLS, TOOLS, can_call_in_parallel

TOKEN_TEXT = TokenText(byte_tokenizer())
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
WHOLE = pytest.mark.parametrize("whole_calls", [False, True])
HERMES = family_named("hermes")


def choice_of(family: ChatFamily, whole_calls: bool) -> ChatChoice:
    make_parser = partial(OutputParser, family, TOOLS, random.Random(1), False, whole_calls)
    return ChatChoice(make_parser, include_reasoning=True, token_text=TOKEN_TEXT)


def deltas_of(pieces: Sequence[str], reason: FinishReason, stop_reason: str | None = None) -> list[TokenDelta]:
    usage, last = Usage(1, len(pieces), 0), len(pieces) - 1
    return [
        TokenDelta(
            "r", place, (7,), text, usage, finish_reason=reason if place == last else None, stop_reason=stop_reason
        )
        for place, text in enumerate(pieces)
    ]


def streamed(choice: ChatChoice, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
    """Return the message that a client joins out of the parts of a stream."""
    content, calls = "", list[dict[str, str]]()
    for delta in deltas:
        for part in map(part_of, choice.events(delta)):
            content += part.get("content", "")
            for call in part.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"content": content, "calls": calls}


def whole(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return {"content": message["content"] or "", "calls": calls}


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@EVERY
@WHOLE
def test_an_output_that_ends_within_its_calls_is_the_same_streamed_and_whole(
    family: ChatFamily, whole_calls: bool
) -> None:
    text = family.calls.write(CALLS if can_call_in_parallel(family) else CALLS[:1])
    for end in range(1, len(text) + 1, 3):
        pieces = [text[start : min(start + 5, end)] for start in range(0, end, 5)]
        deltas = deltas_of(pieces, FinishReason.STOP, "<stop>")
        in_parts, at_once = choice_of(family, whole_calls), choice_of(family, whole_calls)
        (merged,) = deltas_of([text[:end]], FinishReason.STOP, "<stop>")
        found = streamed(in_parts, deltas)
        assert found == whole(at_once.message(merged)), text[:end]
        ending = in_parts.ending(deltas[-1])
        assert ending == at_once.ending(merged) and ending["stop_reason"] == "<stop>"
        all_whole = bool(found["calls"]) and all(is_object(call["arguments"]) for call in found["calls"])
        assert ending["finish_reason"] == ("tool_calls" if all_whole else "stop"), (text[:end], found)


@pytest.mark.parametrize(
    ("reason", "cut", "expected"),
    [
        (FinishReason.STOP, 0, "tool_calls"),
        (FinishReason.STOP, 30, "stop"),
        (FinishReason.LENGTH, 0, "length"),
        (FinishReason.LENGTH, 30, "length"),
    ],
)
def test_only_whole_calls_are_reason_to_finish(reason: FinishReason, cut: int, expected: str) -> None:
    text = HERMES.calls.write(CALLS[:1])
    choice = choice_of(HERMES, whole_calls=False)
    (delta,) = deltas_of([text[: len(text) - cut]], reason)
    message = choice.message(delta)
    assert len(message["tool_calls"]) == 1
    assert choice.ending(delta)["finish_reason"] == expected
