"""Detection of families from templates, and of what a template does with calls."""

import pytest

from serve_app.openai.tools.detection import adapted, detect, probed
from serve_app.openai.tools.families import FAMILIES, ToolList, family_named
from tests.unit.openai.tools.rendering import TOOL_OBJECTS, JsonObject, renderer

SIGNS = [(family.name, "{{ tools }}" + "".join(signs)) for family in FAMILIES for signs in family.signs]
CALL_AS_OBJECT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}{# tools #}"
)
CALL_AS_TEXT = CALL_AS_OBJECT.replace(" | tojson", "")
CALL_WITHOUT_CONTENT = (
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "<｜tool▁calls▁begin｜>{{ c.function.name + '\\n```json\\n' + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALL_NEVER = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{# tools tool_calls #}"
CONTENT_ALWAYS = CALL_AS_OBJECT.replace("m.content or ''", "m.content")


@pytest.mark.parametrize(("name", "template"), SIGNS)
def test_a_template_with_a_familys_signs_is_of_that_family(name: str, template: str) -> None:
    found = detect(template)
    assert found.calls == family_named(name).calls


def test_tokens_may_name_the_family_of_a_plain_template() -> None:
    assert detect("{{ messages }}").name == "generic"
    assert detect("{{ messages }}", ["<|im_end|>", "[TOOL_CALLS]"]).name == "mistral_v3"
    assert detect('<tool_call>{"name"', ["[TOOL_CALLS]"]).name == "hermes"


def test_reasoning_is_found_in_the_template_or_the_tokens() -> None:
    assert detect("<tool_call>").reasoning is None
    for template, tokens in (("<tool_call> </think>", ()), ("<tool_call>", ("<think>", "</think>"))):
        found = detect(template, tokens).reasoning
        assert found and (found.begin, found.end) == ("<think>", "</think>")
    mistral = detect("[TOOL_CALLS][ARGS][THINK]").reasoning
    assert mistral and mistral.end == "[/THINK]"


def test_only_special_tokens_of_calls_and_reasoning_are_visible() -> None:
    tokens = ["<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "[ARGS]", "[TOOL_CALLS]", "[CALL_ID]"]
    assert detect('<tool_call>{"name" <think>').visible_tokens(tokens) == {*tokens[1:5]}
    assert detect("[TOOL_CALLS][ARGS]").visible_tokens(tokens) == {*tokens[5:]}
    harmony = {"<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|call|>"}
    assert family_named("harmony").visible_tokens([*harmony, "<|endoftext|>"]) == harmony


def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    found = detect("{{ messages }}")
    assert found.tool_list is ToolList.SYSTEM_TEXT and not found.renders_calls
    found = detect("<tool_call>{{ tools }}{{ message.tool_calls }}")
    assert found.tool_list is ToolList.TEMPLATE and found.renders_calls
    assert adapted(family_named("phi4_mini"), "{{ message['tools'] }}").tool_list is ToolList.SYSTEM_FIELD


@pytest.mark.parametrize(
    ("template", "renders", "text", "null"),
    [
        (CALL_AS_OBJECT, True, False, True),
        (CALL_AS_TEXT, True, True, True),
        (CALL_WITHOUT_CONTENT, True, True, True),
        (CONTENT_ALWAYS, True, False, False),
        (CALL_NEVER, False, False, False),
    ],
)
def test_the_form_of_earlier_calls_is_found_by_trying(template: str, renders: bool, text: bool, null: bool) -> None:
    found = probed(detect(template), renderer(template, TOOL_OBJECTS))
    assert (found.renders_calls, found.takes_text_arguments, found.takes_null_content) == (renders, text, null)


def test_a_template_that_refuses_calls_gets_them_as_text() -> None:
    def refuse(messages: list[JsonObject]) -> str:
        raise RuntimeError("no")

    assert not probed(detect(CALL_AS_OBJECT), refuse).renders_calls
