"""Detection of families from templates, and of what a template does with calls."""

import pytest

from serve_app.openai.tools.detection import detect, probed
from serve_app.openai.tools.families import FAMILIES, ToolList, family_named
from serve_app.openai.tools.messages import prompt_messages
from tests.unit.openai.tools.rendering import TOOL_OBJECTS, JsonObject, renderer

USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
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


@pytest.mark.parametrize(
    ("name", "template", "place"),
    [
        ("generic", PLAIN, ToolList.SYSTEM_TEXT),
        ("generic", f"You have no tools, and make no tool_calls.{PLAIN}", ToolList.SYSTEM_TEXT),
        ("hermes", f"{{{{ tools }}}}{PLAIN}", ToolList.TEMPLATE),
        ("hermes", f"{{{{ toolbox }}}}{PLAIN}", ToolList.SYSTEM_TEXT),
        ("phi4_mini", f"{PLAIN}{{{{ messages[0]['tools'] }}}}", ToolList.SYSTEM_FIELD),
        ("phi4_mini", PLAIN, ToolList.SYSTEM_TEXT),
        ("generic", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ToolList.SYSTEM_TEXT),
        ("generic", f"{{% if messages[0].role == 'system' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{PLAIN}",
         ToolList.SYSTEM_TEXT),
    ],
)  # fmt: skip
def test_the_place_of_tools_is_found_by_trying(name: str, template: str, place: ToolList) -> None:
    family = probed(family_named(name), renderer(template))
    assert family.tool_list is place
    listed = TOOL_OBJECTS if place is ToolList.TEMPLATE else []
    prompt = renderer(template)(prompt_messages(family, [USER], TOOL_OBJECTS), listed)
    assert "get_weather" in prompt and "hi" in prompt


@pytest.mark.parametrize(
    ("template", "renders_results"),
    [
        (CALL_AS_OBJECT, True),
        (CALL_AS_OBJECT.replace("messages", "messages if m.role != 'tool'"), False),
        (f"{{{{ tools }}}}{PLAIN}", True),
        (f"{{{{ tools }}}}{PLAIN}".replace("messages", "messages if m.role != 'tool'"), False),
        (PLAIN, False),
    ],
)
def test_a_result_reaches_the_prompt(template: str, renders_results: bool) -> None:
    family = probed(detect(template), renderer(template))
    assert family.renders_results is renders_results
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    turns: list[JsonObject] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    prompt = renderer(template)(prompt_messages(family, turns))
    assert "Oslo" in prompt and "sunny" in prompt


def test_a_comment_of_a_template_is_no_sign() -> None:
    comment = "{# unlike <tool_call><function= and\n [TOOL_CALLS] and <think> #}"
    found = detect(comment + '<tool_call>{"name"')
    assert (found.name, found.reasoning) == ("hermes", None)


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
    found = probed(detect(template), renderer(template))
    assert (found.renders_calls, found.takes_text_arguments, found.takes_null_content) == (renders, text, null)


def test_a_template_that_refuses_calls_gets_them_as_text() -> None:
    def refuse(messages: list[JsonObject], tools: list[JsonObject]) -> str:
        raise RuntimeError("no")

    assert not probed(detect(CALL_AS_OBJECT), refuse).renders_calls
