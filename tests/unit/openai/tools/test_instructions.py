"""Messages of the system and of developers: their text reaches the prompt, behind what stands before it."""

from itertools import product
from typing import Any

import pytest

from serve_app.openai.tools.instructions import InstructionRules
from tests.unit.openai.tools.rendering import renderer

ALL_ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OWN_BRANCH = (
    "{% for m in messages %}{% if m.role == 'developer' %}[[{{ m.content }}]]{% else %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
NO_DEVELOPER = (
    "Made by the developers of Example. {% for m in messages if m.role in ['system', 'user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
REFUSES_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('unknown role developer') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
FIRST_ONLY = (
    "{% set first = messages[0] %}{% if first.role in ['developer', 'system'] %}<developer>{{ first.content }}"
    "{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}<system>{{ ns.system }}{% for m in messages if m.role in ['user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_INSTRUCTIONS = "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turn') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TEMPLATES = (
    ALL_ROLES,
    OWN_BRANCH,
    NO_DEVELOPER,
    REFUSES_DEVELOPER,
    FIRST_ONLY,
    LAST_SYSTEM,
    NO_INSTRUCTIONS,
    REFUSES_SYSTEM,
)


def conversation(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


def prompt_of(template: str, *turns: tuple[str, str]) -> str:
    render = renderer(template)
    return render(InstructionRules.probed(render).apply(conversation(*turns)))


DEVELOPER, SYSTEM, USER, ASSISTANT = ("developer", "French."), ("system", "Brief."), ("user", "hi"), ("assistant", "ja")


@pytest.mark.parametrize(
    ("template", "turns", "prompt"),
    [
        (ALL_ROLES, [DEVELOPER, USER], "<system>French.<user>hi"),
        (OWN_BRANCH, [DEVELOPER, SYSTEM, USER], "[[French.]]<system>Brief.<user>hi"),
        (OWN_BRANCH, [SYSTEM, USER, ASSISTANT, DEVELOPER], "<system>Brief.<user>hi<assistant>ja[[French.]]"),
        (NO_DEVELOPER, [DEVELOPER, USER], "Made by the developers of Example. <system>French.<user>hi"),
        (REFUSES_DEVELOPER, [SYSTEM, DEVELOPER, USER], "<system>Brief.<system>French.<user>hi"),
        (REFUSES_DEVELOPER, [USER, ASSISTANT, DEVELOPER, USER], "<user>hi<assistant>ja<system>French.<user>hi"),
        (FIRST_ONLY, [DEVELOPER, USER], "<developer>French.<user>hi"),
        (FIRST_ONLY, [SYSTEM, DEVELOPER, USER], "<developer>Brief.\n\nFrench.<user>hi"),
        (FIRST_ONLY, [DEVELOPER, SYSTEM, DEVELOPER, USER], "<developer>French.\n\nBrief.\n\nFrench.<user>hi"),
        (LAST_SYSTEM, [SYSTEM, DEVELOPER, USER], "<system>Brief.\n\nFrench.<user>hi"),
        (LAST_SYSTEM, [USER, ASSISTANT, DEVELOPER, USER], "<system><user>hi<assistant>ja<user>French.<user>hi"),
    ],
)
def test_instructions_reach_the_prompt(template: str, turns: list[tuple[str, str]], prompt: str) -> None:
    assert prompt_of(template, *turns) == prompt


@pytest.mark.parametrize(
    ("template", "turns", "prompt"),
    [
        (NO_INSTRUCTIONS, [SYSTEM, USER], "<user>Brief.<user>hi"),
        (NO_INSTRUCTIONS, [USER, ASSISTANT, DEVELOPER, USER], "<user>hi<assistant>ja<user>French.<user>hi"),
        (FIRST_ONLY, [SYSTEM, USER, DEVELOPER], "<developer>Brief.<user>hi\n\nFrench."),
        (
            FIRST_ONLY,
            [SYSTEM, USER, DEVELOPER, SYSTEM, ASSISTANT],
            "<developer>Brief.<user>hi\n\nFrench.\n\nBrief.<assistant>ja",
        ),
        (
            FIRST_ONLY,
            [SYSTEM, USER, ASSISTANT, DEVELOPER, USER],
            "<developer>Brief.<user>hi<assistant>ja<user>French.<user>hi",
        ),
        (LAST_SYSTEM, [SYSTEM, USER, SYSTEM, ASSISTANT, USER], "<system>Brief.<user>hi\n\nBrief.<assistant>ja<user>hi"),
        (LAST_SYSTEM, [USER, SYSTEM], "<system><user>hi\n\nBrief."),
        (REFUSES_SYSTEM, [SYSTEM, DEVELOPER, USER], "<user>Brief.\n\nFrench.\n\nhi"),
        (REFUSES_SYSTEM, [USER, SYSTEM, USER, ASSISTANT], "<user>hi\n\nBrief.\n\nhi<assistant>ja"),
        (REFUSES_SYSTEM, [USER, ASSISTANT, SYSTEM, USER], "<user>hi<assistant>ja<user>Brief.\n\nhi"),
        (REFUSES_SYSTEM, [USER, ASSISTANT, ASSISTANT, USER, USER], "<user>hi<assistant>ja\n\nja<user>hi\n\nhi"),
    ],
)
def test_an_instruction_that_is_not_written_at_its_place_is_text_of_the_user(
    template: str, turns: list[tuple[str, str]], prompt: str
) -> None:
    assert prompt_of(template, *turns) == prompt


def test_a_result_takes_the_instruction_behind_it() -> None:
    rules = InstructionRules.probed(renderer(FIRST_ONLY))
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    turns = [*conversation(USER), call, {"role": "tool", "tool_call_id": "a", "content": "12"}, *conversation(SYSTEM)]
    assert rules.apply(turns)[1:] == [call, {"role": "tool", "tool_call_id": "a", "content": "12\n\nBrief."}]


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_turn_of_any_conversation_is_written_and_later_ones_change_no_earlier_text(template: str) -> None:
    render = renderer(template)
    rules = InstructionRules.probed(render)
    for roles in product(("system", "developer", "user", "assistant"), repeat=4):
        turns = conversation(*[(role, f"text-{index}") for index, role in enumerate(roles)], ("user", "text-4"))
        if template is REFUSES_SYSTEM and roles[0] == "assistant":
            continue
        prompt = render(rules.apply(turns))
        assert all(f"text-{index}" in prompt for index in range(5)), (roles, prompt)
        earlier = render(rules.apply(turns[:2]))
        assert roles[1] != "user" or template is REFUSES_SYSTEM or prompt.startswith(earlier), (roles, prompt, earlier)
