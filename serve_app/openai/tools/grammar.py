"""Grammars, in llguidance's Lark, that make calls valid and let a model think before it is bound."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from serve_app.openai.tools.families import ChatFamily
from serve_app.openai.tools.shapes.calls import Tool
from serve_app.openai.tools.shapes.shape import Lark, Marker

_LINE_BREAKS = r"(/\n{1,2}/)?"


class Thinking(Enum):
    """Reasoning that the output may begin with."""

    NONE = auto()
    OPTIONAL = auto()
    """The output may open it."""
    OPEN = auto()
    """The prompt has opened it, and the output closes it."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """Rule for the calls of an answer."""

    is_required: bool
    """True if the answer is one call or several and nothing else; False if text is free until a call begins."""
    parallel: bool = True
    """True if there may be several calls."""
    answer: str | None = None
    """Lark grammar of an answer without calls; None: free text. An answer with calls has then no text."""


def thinking_of(family: ChatFamily, prompt: str) -> Thinking:
    """Return the reasoning that follows a rendered prompt."""
    reasoning = family.reasoning
    if reasoning is None:
        return Thinking.NONE
    end = prompt.rstrip()
    if end.endswith(reasoning.begin):
        return Thinking.OPEN
    return Thinking.NONE if end.endswith(reasoning.end) and not reasoning.answer_begin else Thinking.OPTIONAL


def call_grammar(
    family: ChatFamily, tools: Sequence[Tool], rule: CallRule, marker: Marker, thinking: Thinking = Thinking.NONE
) -> str:
    """Return a Lark grammar of answers with valid calls.

    Args:
        family: Family of the model's chat template.
        tools: Tools that may be called; one tool for a named function.
        rule: Rule for the calls.
        marker: Function that writes markers for the model's tokenizer (`marker_of`).
        thinking: Reasoning before the calls, which is free.

    Raises:
        ValueError: the family cannot write a call of one of the tools.
    """
    lark = Lark(marker)
    thought = _thought(lark, family, thinking)
    if rule.is_required:
        return lark.grammar(f"{thought} {_calls(lark, family, tools, rule.parallel)}")
    if rule.answer is not None:
        answer = f"{_answer_begin(lark, family)} {lark.rule(_nested(rule.answer))}"
        return lark.grammar(f"{thought} ({_calls(lark, family, tools, rule.parallel)} | {answer})")
    return lark.grammar(f"{thought} {_free(lark, family, tools, rule.parallel, thinking)}")


def answer_grammar(family: ChatFamily, grammar: str, marker: Marker, thinking: Thinking) -> str:
    """Return a Lark grammar whose answer follows `grammar`, and whose reasoning is free."""
    reasoning = family.reasoning
    if reasoning is None or (thinking is Thinking.NONE and not reasoning.answer_begin):
        return grammar
    lark = Lark(marker)
    answer = lark.rule(_nested(grammar))
    return lark.grammar(f"{_thought(lark, family, thinking)} {_answer_begin(lark, family)} {answer}")


def _nested(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _answer_begin(lark: Lark, family: ChatFamily) -> str:
    return lark.text(family.reasoning.answer_begin) if family.reasoning else ""


def _thought(lark: Lark, family: ChatFamily, thinking: Thinking) -> str:
    reasoning = family.reasoning
    if reasoning is None or thinking is Thinking.NONE:
        return ""
    end = f"{lark.text_until(reasoning.end)} {lark.text(reasoning.turn_begin) or _LINE_BREAKS}"
    return lark.rule(end) if thinking is Thinking.OPEN else f"({lark.text(reasoning.begin)} {lark.rule(end)})?"


def _calls(lark: Lark, family: ChatFamily, tools: Sequence[Tool], parallel: bool) -> str:
    """Return the expression of one call, or of several."""
    shape = family.calls
    block = lark.rule(f"{lark.text(shape.begin)} {shape.bind(lark, tools, parallel and shape.holds_several)}")
    if not parallel or shape.holds_several or shape.block_separator is None:
        return block
    return f"{block} ({lark.text(shape.block_separator)} {block})*"


def _free(lark: Lark, family: ChatFamily, tools: Sequence[Tool], parallel: bool, thinking: Thinking) -> str:
    """Return the expression of text that is bound as soon as a call begins."""
    shape, reasoning = family.calls, family.reasoning
    if reasoning and reasoning.answer_begin:
        answer = f"{lark.text(reasoning.answer_begin)} TEXT"
        return f"({answer} | {_calls(lark, family, tools, parallel=False)})"
    block = lark.rule(shape.bind(lark, tools, parallel and shape.holds_several))
    head = _head(lark, family, thinking)
    if not shape.begin:
        marked = [f"{lark.text(begin)} {block}" for begin in shape.other_begins]
        return f"({lark.any_of([block, *marked, head])})?"
    first = f"{lark.text_until(shape.begin, head)} {block}"
    if not parallel:
        return f"({first} | {head})"
    return f"({head} | {first} ({lark.text_until(shape.begin)} {block})* TEXT)"


def _head(lark: Lark, family: ChatFamily, thinking: Thinking) -> str:
    """Return the terminal of text at the begin of an answer.

    It cannot begin as a block without a marker does, nor with a marker of reasoning that is plain text: such a begin
    decides how the answer goes on.
    """
    shape, reasoning = family.calls, family.reasoning
    excluded = []
    if reasoning and thinking is Thinking.OPTIONAL and not lark.has_special(reasoning.begin):
        excluded.append(reasoning.begin)
    if not shape.begin:
        excluded += [*shape.openings, *(one for one in shape.other_begins if not lark.has_special(one))]
    if not excluded:
        return "TEXT"
    pattern = "|".join(re.escape(text).replace("/", r"\/") for text in excluded)
    return lark.terminal("HEAD", rf"TEXT & ~/[ \n]*({pattern})(.|\n)*/")
