"""Outputs of every family: content, reasoning and calls, whole and streamed."""

import random

import pytest

from serve_app.openai.tools.families import FAMILIES, ChatFamily, family_named
from serve_app.openai.tools.parser import MAX_MALFORMED, OutputParser
from serve_app.openai.tools.shapes.calls import Call, CallArguments, CallBegin, Content, Tool
from tests.unit.openai.tools.cases import (
    CALLS,
    HARD_TEXT,
    REASONED,
    answer_text,
    can_call_in_parallel,
    parse,
    reasoning_text,
)

EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
EVERY_REASONED = pytest.mark.parametrize("family", REASONED, ids=lambda family: family.name)
STREAMED = pytest.mark.parametrize("step", [1, 7, 10_000])
WHOLE = pytest.mark.parametrize("whole_calls", [False, True])
HERMES = family_named("hermes")


def pieces(text: str, step: int) -> list[str]:
    return [text[start : start + step] for start in range(0, len(text), step)]


@pytest.mark.sampled(68)
@EVERY
@STREAMED
@WHOLE
def test_calls_are_read_as_they_were_written(family: ChatFamily, step: int, whole_calls: bool) -> None:
    calls = CALLS if can_call_in_parallel(family) else CALLS[:1]
    parsed = parse(family, pieces(family.calls.write(calls), step), whole_calls=whole_calls)
    assert parsed.calls == [(call.name, call.arguments) for call in calls]
    assert (parsed.content, parsed.reasoning, parsed.num_malformed) == ("", "", 0)


@pytest.mark.sampled(68)
@EVERY_REASONED
@STREAMED
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_comes_before_calls_and_before_answers(family: ChatFamily, step: int, is_open: bool) -> None:
    is_open = is_open and family.name != "harmony"
    thought = reasoning_text(family, f"Let me see {HARD_TEXT.strip()}", is_open)
    calling = parse(family, pieces(thought + family.calls.write(CALLS[:1]), step), in_reasoning=is_open)
    assert calling.calls == [(CALLS[0].name, CALLS[0].arguments)]
    assert (calling.reasoning, calling.content) == (f"Let me see {HARD_TEXT.strip()}", "")
    answering = parse(family, pieces(thought + answer_text(family, "It is\n\nsunny."), step), in_reasoning=is_open)
    assert (answering.reasoning, answering.content) == (calling.reasoning, "It is\n\nsunny.")
    assert answering.calls == [] and answering.num_malformed == 0


@pytest.mark.sampled(34)
@EVERY
@STREAMED
def test_without_tools_an_answer_stays_as_it_is(family: ChatFamily, step: int) -> None:
    text = f"  Code:\n{HARD_TEXT} \n"
    assert parse(family, pieces(text, step), tools=()).content == text


@pytest.mark.sampled(34)
@EVERY
@STREAMED
def test_a_marker_that_turns_out_to_be_text_is_content(family: ChatFamily, step: int) -> None:
    begin = family.calls.begin
    for text in filter(None, [f"I write {begin} like this.\n", begin, begin[:-1] and f"Half of it: {begin[:-1]}"]):
        parsed = parse(family, pieces(text, step))
        assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.sampled(25)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Hm <tool_call>{"name": "add", "arguments": [1]}</tool_call>!'),
        ("hermes", 'Hm <tool_call>{"nam": "add"}</tool_call>'),
        ("hermes", "Hm <tool_call>\nadd(1)\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS] add the numbers"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{1}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>none"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</tool_call>"),
        ("glm45", "<tool_call>just text</tool_call>"),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(**x)]<|tool_call_end|>"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>nothing"),
        ("gemma4", "<|tool_call>call:add{xs:[1,,2]}<tool_call|>"),
        ("gemma4", "<|tool_call>call:add{xs:[1]"),
        ("gemma4", "<|tool_call>call:add{xs}<tool_call|>"),
        ("gemma4", '<|tool_call>call:add{xs:<|"|>a}<tool_call|>'),
        ("gemma4", "<|tool_call>call:add[1]<tool_call|>"),
        ("gemma4", "<|tool_call>call:add{xs:{a:1}]}<tool_call|>"),
        ("gemma4", "<|tool_call>add{}<tool_call|>"),
        ("llama3_json", '{"name": "add", "parameters": [1]}'),
    ],
)
@STREAMED
def test_a_malformed_call_stays_text_and_is_counted(name: str, text: str, step: int) -> None:
    parsed = parse(family_named(name), pieces(text, step), whole_calls=True)
    assert (parsed.content, parsed.names, parsed.num_malformed) == (text, [], 1)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", ["llama3_json", "llama4_json", "xlam", "pythonic", "llama4_pythonic"])
@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 3}', '[{"name": "Bob"}]', "[1, 2]", "[]", "{}", "[f(x)] yes"])
@STREAMED
def test_a_json_answer_is_no_call_where_calls_have_no_marker(name: str, text: str, step: int) -> None:
    parsed = parse(family_named(name), pieces(text, step))
    assert (parsed.content, parsed.names, parsed.num_malformed) == (text, [], 0)


@STREAMED
def test_a_call_that_breaks_while_it_streams_stays_a_call(step: int) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"xs": [1, oops</tool_call>'
    parsed = parse(HERMES, pieces(text, step))
    assert parsed.names == ["add"] and parsed.arguments == ['{"xs": [1, ']
    assert (parsed.content, parsed.num_malformed) == ("oops</tool_call>", 1)
    cut = parse(HERMES, pieces(text[: text.index("oops")], step))
    assert (cut.arguments, cut.content, cut.num_malformed) == (['{"xs": [1, '], "", 1)


@STREAMED
@WHOLE
def test_the_rest_of_a_block_with_a_malformed_call_is_content(step: int, whole_calls: bool) -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": 1}] Well.'
    parsed = parse(family_named("mistral_v3"), pieces(text, step), whole_calls=whole_calls)
    assert parsed.calls == [("now", {})]
    assert (parsed.content, parsed.num_malformed) == (', {"name": 1}] Well.', 1)


@pytest.mark.sampled(44)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>'),
        ("hermes", '<tool_call> [{"name":"get_weather","arguments":{"city": "Oslo"}}] </tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"id": 3, "name": "get_weather", "parameters": {"city": "Oslo"}, "x": [1]}'),
        ("smollm2", '<tool_call>[\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n]</tool_call>'),
        ("llama3_json", '\n <|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}'),
        ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}'),
        ("granite", '<tool_call>[{"arguments": {"city": "Oslo"}, "name": "get_weather"}]'),
        ("phi4_mini", 'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'),
        ("phi4_functools", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>'),
        ("llama4_json", '<|python_start|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|python_end|>'),
        ("granite_20b_fc", '<function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}}'),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"}'),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>"),
        ("pythonic", "[get_weather(city='Oslo')]"),
        ("llama4_pythonic", '<|python_start|>[get_weather(city="Oslo")]<|python_end|>'),
        ("gemma4", '<|tool_call> call:get_weather{ city : <|"|>Oslo<|"|> }'),
        ("gemma4", '<|tool_call>call:get_weather{<|"|>city<|"|>:<|"|>Oslo<|"|>}<tool_call|>'),
        ("gemma4", "<|tool_call>call:get_weather{city:Oslo}<tool_call|>"),
        ("harmony", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'),
        ("harmony", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Oslo"}'),
    ],
)
@STREAMED
@WHOLE
def test_what_models_write_otherwise_is_understood(name: str, text: str, step: int, whole_calls: bool) -> None:
    parsed = parse(family_named(name), pieces(text, step), whole_calls=whole_calls)
    assert parsed.calls == [("get_weather", {"city": "Oslo"})]
    assert (parsed.content, parsed.num_malformed) == ("", 0)


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert parse(HERMES, ['<tool_call>{"name": "now"}</tool_call>']).calls == [("now", {})]
    assert parse(family_named("glm45"), ["<tool_call>now\n</tool_call>"]).calls == [("now", {})]
    assert parse(family_named("pythonic"), ["[now()]"]).calls == [("now", {})]
    assert parse(family_named("smollm2"), ["<tool_call>[]</tool_call>"]).kinds == []


@STREAMED
def test_text_around_calls_is_content_and_white_space_is_not(step: int) -> None:
    text = f"Let me look.\n\n{HERMES.calls.write(CALLS)}\n\nDone."
    parsed = parse(HERMES, pieces(text, step))
    assert parsed.content == "Let me look.Done."
    assert parsed.kinds == ["Content", *["CallBegin", "CallArguments"] * 2, "Content"]


@STREAMED
def test_values_between_tags_get_the_type_of_their_schema(step: int) -> None:
    properties = {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "choice": {"enum": ["1", "2"]},
        "object": {"type": "object"},
    }
    tool = Tool("f", {"type": "object", "properties": properties})
    texts = {"text": "12", "number": "1.5", "either": "null", "choice": "2", "object": "{'a': True}", "unknown": "7"}
    written = Call("f", texts)
    expected = {"text": "12", "number": 1.5, "either": None, "choice": "2", "object": {"a": True}, "unknown": 7}
    for name in ("qwen3_coder", "glm45", "seed_oss", "minimax_m2"):
        family = family_named(name)
        assert parse(family, pieces(family.calls.write([written]), step), tools=[tool]).calls == [("f", expected)]


@STREAMED
def test_tags_that_say_what_is_a_string_decide_where_the_schema_leaves_it_open(step: int) -> None:
    properties = {"text": {"type": "string"}, "number": {"type": "number"}, "either": {"type": ["string", "integer"]}}
    tool = Tool("f", {"type": "object", "properties": properties})
    written = {
        "text": ("false", "12", "12"),
        "number": ("true", "1.5", 1.5),
        "either": ("true", "7", "7"),
        "open": ("false", '{"a": [null, "x"]}', {"a": [None, "x"]}),
        "python": ("false", "{'a': True}", {"a": True}),
        "plain": ("true", "[1]", "[1]"),
        "no_json": ("false", "some text", "some text"),
    }
    for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
        tags = [
            f'<｜DSML｜parameter name="{key}" string="{mark}">{text}</｜DSML｜parameter>'
            for key, (mark, text, _) in written.items()
        ]
        call = f'<｜DSML｜invoke name="f">{"".join(tags)}</｜DSML｜invoke>'
        text = f"Hm.\n\n<｜DSML｜{block}>\n{call}\n{call}</｜DSML｜{block}>"
        parsed = parse(family_named(name), pieces(text, step), tools=[tool])
        assert parsed.calls == [("f", {key: value for key, (_, _, value) in written.items()})] * 2
        assert (parsed.content, parsed.num_malformed) == ("Hm.", 0)
        for bad in (text.replace('"true"', '"maybe"'), text.replace("</｜DSML｜invoke>", "")):
            assert parse(family_named(name), pieces(bad, step), tools=[tool]).content == bad


@STREAMED
def test_values_in_braces_are_read_as_their_text_says(step: int) -> None:
    text = (
        '<|tool_call>call:f{a:[],b:{},c:{<|"|>k: {<|"|>:[{x:None},true,False]},d:<|"|>}]{,:"\'\n<|"|>,e:-1.5e3,'
        "f:null}<tool_call|><|tool_call>call:f{}<tool_call|>"
    )
    parsed = parse(family_named("gemma4"), pieces(text, step), tools=[Tool("f")])
    first = {
        "a": [],
        "b": {},
        "c": {"k: {": [{"x": None}, True, False]},
        "d": "}]{,:\"'\n",
        "e": -1500.0,
        "f": None,
    }
    assert parsed.calls == [("f", first), ("f", {})]
    assert (parsed.content, parsed.num_malformed) == ("", 0)


@STREAMED
def test_values_in_nested_tags_get_the_type_of_their_schema(step: int) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string"}}}
    properties = {
        "points": {"type": "array", "items": point},
        "none": {"type": "array", "items": {"type": "string"}},
        "item": {"type": "object", "properties": {"item": {"type": "integer"}}},
        "text": {"type": "string"},
    }
    ns = "]<]minimax[>["
    text = (
        f'{ns}<tool_call>\n{ns}<invoke name="f">{ns}<points>\n{ns}<item>{ns}<x>3{ns}</x>{ns}<name>4{ns}</name>'
        f"{ns}</item>{ns}</points>{ns}<none>{ns}</none>{ns}<item>{ns}<item>5{ns}</item>{ns}</item>{ns}<text>"
        f" 6\n{ns}</text>{ns}<open>{ns}<item>true{ns}</item>{ns}<item>{ns}<a>b{ns}</a>{ns}</item>{ns}</open>"
        f'{ns}</invoke>\n{ns}<invoke name="g">{ns}</invoke>{ns}</tool_call>'
    )
    tool = Tool("f", {"type": "object", "properties": properties})
    expected = {
        "points": [{"x": 3, "name": "4"}],
        "none": [],
        "item": {"item": 5},
        "text": " 6\n",
        "open": [True, {"a": "b"}],
    }
    family = family_named("minimax_m3")
    parsed = parse(family, pieces(text, step), tools=[tool, Tool("g")])
    assert parsed.calls == [("f", expected), ("g", {})] and (parsed.content, parsed.num_malformed) == ("", 0)
    call = f'{ns}<tool_call>{ns}<invoke name="g">'
    for body in (
        f"{ns}<a>1",
        f"{ns}</a>",
        f"text{ns}<a>{ns}</a>",
        f"{ns}<a>t{ns}<b>{ns}</b>{ns}</a>",
        f"{ns}a",
        f"{ns}<a",
    ):
        bad = f"{call}{body}{ns}</invoke>{ns}</tool_call>"
        broken = parse(family, pieces(bad, step), tools=[Tool("g")])
        assert (broken.content, broken.names, broken.num_malformed) == (bad, [], 1), bad


@STREAMED
def test_the_end_of_reasoning_at_the_begin_of_an_output_is_dropped(step: int) -> None:
    for family in REASONED:
        if family.name != "harmony" and family.reasoning:
            parsed = parse(family, pieces(f"{family.reasoning.end}\n\n{answer_text(family, 'Yes.')}", step))
            assert (parsed.reasoning, parsed.content) == ("", "Yes."), family.name
    assert parse(REASONED[1], pieces("Hm. </think>", step)).content == "Hm. </think>"


def test_a_closing_tag_within_a_value_is_text() -> None:
    family = family_named("qwen3_coder")
    call = Call("get_weather", {"city": "a</parameter> b\n</parameter>\nc"})
    assert parse(family, [family.calls.write([call])]).calls == [(call.name, call.arguments)]


def test_arguments_stream_as_they_arrive_where_they_are_json() -> None:
    parser = OutputParser(HERMES, [Tool("f")], random.Random(0))
    assert parser.push('Hi <tool_call>\n{"name": "f", "argum') == [Content("Hi")]
    (begin, *pieces_of_arguments) = parser.push('ents": {"a": "b')
    assert isinstance(begin, CallBegin) and begin.name == "f"
    assert pieces_of_arguments == [CallArguments(0, '{"a": "b')]
    assert parser.push('c"}') == [CallArguments(0, 'c"}')]
    assert parser.push("}\n</tool_call>") + parser.finish() == []


@EVERY
def test_ids_are_the_familys_own(family: ChatFamily) -> None:
    calls = [Call(call.name, call.arguments) for call in CALLS]
    parsed = parse(family, [family.calls.write(calls if can_call_in_parallel(family) else calls[:1])])
    assert len(set(parsed.ids)) == len(parsed.ids)
    for call_id in parsed.ids:
        if family.name == "kimi_k2":
            assert call_id.startswith("functions.")
        else:
            assert call_id.startswith(family.id_prefix) and len(call_id) == len(family.id_prefix) + family.id_length


def test_mistrals_ids_are_taken_from_the_text() -> None:
    family = family_named("mistral")
    assert parse(family, [family.calls.write(CALLS)]).ids == ["abcdef123", "abcdef124"]


def test_no_marker_is_the_begin_of_another_of_its_family() -> None:
    for family in FAMILIES:
        for marker in family.markers:
            others = [other for other in family.markers if other != marker]
            allowed = {"<|channel|>"} if family.name == "harmony" else set()
            assert not any(other.startswith(marker) for other in others if marker not in allowed), family.name


def test_deep_nesting_and_long_numbers_are_only_malformed() -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    huge = f'{{"a": {"9" * 5000}}}'
    for name in ("hermes", "mistral"):
        family = family_named(name)
        for text in (deep, huge):
            written = family.calls.write([Call("f", {})]).replace("{}", text)
            assert parse(family, [written], whole_calls=True).num_malformed == 1
    braces = "<|tool_call>call:f{a:" + "[" * 3000 + "]" * 3000 + "}<tool_call|>"
    parsed = parse(family_named("gemma4"), [braces])
    assert (parsed.num_malformed, parsed.content) == (1, braces)
    nested = "[f(a=" + "[" * 3000 + "]" * 3000 + ")]"
    parsed = parse(family_named("lfm2"), [f"<|tool_call_start|>{nested}<|tool_call_end|>"])
    assert parsed.num_malformed == 1 and nested in parsed.content


def test_an_unknown_name_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"tool_call_parser is 'foo'; it must be one of .*hermes"):
        family_named("foo")
    for name in ("hermes", "llama3_json", "llama4_pythonic", "pythonic", "mistral", "deepseek_v3", "deepseek_v31"):
        assert family_named(name).name == name
    for name in (
        "granite-20b-fc",
        "llama4_json",
        "phi4_mini_json",
        "granite",
        "glm45",
        "openai",
        "xlam",
        "qwen3_coder",
        "cohere_command3",
    ):
        assert name in (family_named(name).name, *family_named(name).aliases)


@pytest.mark.parametrize("whole_calls", [False, True])
def test_after_many_malformed_calls_the_rest_is_text(whole_calls: bool) -> None:
    """Each malformed call may be read up to the end of the text, so their number has a bound."""
    family = family_named("lfm2")
    unit = '<|tool_call_start|>["\\"'
    text = unit * (MAX_MALFORMED + 20) + family.calls.write(CALLS[:1])
    parsed = parse(family, [text], whole_calls=whole_calls)
    assert (parsed.content, parsed.names, parsed.num_malformed) == (text, [], MAX_MALFORMED)
    few = unit * (MAX_MALFORMED - 1) + family.calls.write(CALLS[:1])
    assert parse(family, [few], whole_calls=whole_calls).num_malformed >= MAX_MALFORMED - 1
