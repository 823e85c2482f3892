"""Messages of the system and of developers: their text reaches the prompt, or the request is refused."""

from itertools import product
from typing import Any

import pytest

from replicas.errors import InvalidRequest
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
        (LAST_SYSTEM, [USER, ASSISTANT, DEVELOPER, USER], "<system>French.<user>hi<assistant>ja<user>hi"),
    ],
)
def test_instructions_reach_the_prompt(template: str, turns: list[tuple[str, str]], prompt: str) -> None:
    assert prompt_of(template, *turns) == prompt


@pytest.mark.parametrize(
    ("template", "turns", "index", "role"),
    [
        (NO_INSTRUCTIONS, [SYSTEM, USER], 0, "system"),
        (NO_INSTRUCTIONS, [DEVELOPER, USER], 0, "developer"),
        (FIRST_ONLY, [SYSTEM, USER, ASSISTANT, DEVELOPER, USER], 3, "developer"),
        (FIRST_ONLY, [SYSTEM, SYSTEM, USER, ASSISTANT, SYSTEM, USER], 4, "system"),
        (FIRST_ONLY, [USER, SYSTEM], 1, "system"),
        (LAST_SYSTEM, [SYSTEM, USER, ASSISTANT, SYSTEM, USER], 3, "system"),
    ],
)
def test_an_instruction_that_would_be_left_out_is_refused_by_its_place(
    template: str, turns: list[tuple[str, str]], index: int, role: str
) -> None:
    with pytest.raises(InvalidRequest, match="leaves out messages of this role") as caught:
        prompt_of(template, *turns)
    assert (caught.value.param, caught.value.code) == (f"messages[{index}].role", "unsupported_parameter")
    assert f'`messages[{index}].role` is "{role}"' in caught.value.message


def test_a_template_that_refuses_an_instruction_gives_its_reason() -> None:
    for turns in ([SYSTEM, USER], [DEVELOPER, SYSTEM, USER]):
        with pytest.raises(Exception, match="no system"):
            prompt_of(REFUSES_SYSTEM, *turns)
    with pytest.raises(Exception, match="no turn"):
        prompt_of(REFUSES_SYSTEM, USER, ASSISTANT, SYSTEM, USER)


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_instruction_of_any_conversation_is_lost(template: str) -> None:
    render, num_rendered = renderer(template), 0
    rules = InstructionRules.probed(render)
    for roles in product(("system", "developer", "user", "assistant"), repeat=4):
        turns = conversation(*[(role, f"text-{index}") for index, role in enumerate(roles)], ("user", "text-4"))
        try:
            applied = rules.apply(turns)
        except InvalidRequest:
            continue
        try:
            prompt = render(applied)
        except Exception:
            continue
        num_rendered += 1
        assert all(f"text-{index}" in prompt for index in range(5)), (roles, prompt)
    assert num_rendered > 0
