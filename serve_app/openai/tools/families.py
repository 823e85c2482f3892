"""Families of chat templates: how their models write calls and reasoning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from serve_app.openai.tools.instructions import InstructionRules
from serve_app.openai.tools.shapes.braced_calls import BracedCalls
from serve_app.openai.tools.shapes.calls import Call
from serve_app.openai.tools.shapes.channel_calls import ChannelCalls
from serve_app.openai.tools.shapes.json_calls import JsonCalls
from serve_app.openai.tools.shapes.named_calls import NamedCalls
from serve_app.openai.tools.shapes.nested_calls import NestedCalls
from serve_app.openai.tools.shapes.pythonic_calls import PythonicCalls
from serve_app.openai.tools.shapes.shape import CallShape
from serve_app.openai.tools.shapes.xml_calls import XmlCalls

HERMES_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, write the function's name and its arguments in this form:
{call}"""

_SMOLLM2_PROMPT = """You are an expert in composing functions. You are given a question and a set of possible \
functions. Based on the question, you will need to make one or more function/tool calls to achieve the purpose. \
If none of the functions can be used, point it out and refuse to answer. \
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tool_list}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. \
If no function call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers around the text that a model thinks before its answer."""

    begin: str
    end: str
    turn_begin: str = ""
    """Text between the reasoning and what follows it."""
    answer_begin: str = ""
    """Text before an answer that is no call."""


class ToolList(Enum):
    """Place of the tools in the prompt."""

    TEMPLATE = auto()
    """The chat template writes them."""
    SYSTEM_FIELD = auto()
    """The system message has a field for them, which the template writes."""
    SYSTEM_TEXT = auto()
    """The template knows no tools: they are described in the system message's text."""


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """Description of a family of chat templates."""

    name: str
    calls: CallShape
    signs: tuple[tuple[str, ...], ...] = ()
    """Texts that a template of the family contains: all texts of one of these groups."""
    aliases: tuple[str, ...] = ()
    """Further names, as vLLM has them."""
    reasoning: ReasoningMarkers | None = None
    answer_markers: tuple[str, ...] = ()
    """Markers around the answer, which are no part of it."""
    id_prefix: str = "call_"
    id_length: int = 24
    """Random characters of a call's id."""
    tool_list: ToolList = ToolList.TEMPLATE
    renders_calls: bool = True
    """False if the template leaves out the calls of earlier turns; then they become text."""
    renders_results: bool = True
    """False if the template leaves out the results of calls; then they become text of the user."""
    instructions: InstructionRules = field(default_factory=InstructionRules)
    """Messages of the system and of developers that the template does not write."""
    takes_text_arguments: bool = False
    """True if the template wants the arguments of earlier calls as the text of a JSON object."""
    takes_null_content: bool = False
    """True if the template wants no content, and not an empty one, beside calls."""
    tool_prompt: str = HERMES_PROMPT
    """Description of tools for the system message of a template that knows no tools, with `{tools}`, one a line, or
    `{tool_list}`, and `{call}`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that open calls, and all those around reasoning and the answer."""
        reasoning = [self.reasoning.begin, self.reasoning.end] if self.reasoning else []
        markers = (self.calls.begin, *self.calls.other_begins, *reasoning, *self.answer_markers)
        return tuple(marker for marker in markers if marker)

    def visible_tokens(self, special_tokens: Collection[str]) -> frozenset[str]:
        """Return those of a tokenizer's special tokens that the generated text must show, so that it can be parsed."""
        reasoning = self.reasoning
        behind = [reasoning.turn_begin, reasoning.answer_begin] if reasoning else []
        call = Call("name", {}, "id")
        text = "".join([*self.markers, *behind, self.calls.write([call, call])])
        return frozenset(token for token in special_tokens if token in text)


THINK = ReasoningMarkers("<think>", "</think>")
_HARMONY_REASONING = ReasoningMarkers(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
)
_COMMAND_REASONING = ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>")

HERMES = ChatFamily(
    "hermes",
    JsonCalls("<tool_call>", "</tool_call>", "\n", "\n", block_separator="\n"),
    signs=(("<tool_call>", '"name"'), ("<tool_call>", '"name\\"')),
    aliases=("qwen2", "qwen2_5", "qwen3", "granite4"),
)

GENERIC = ChatFamily("generic", HERMES.calls)
"""Family of templates without a sign of any other."""


def _dsml_family(name: str, block: str) -> ChatFamily:
    """Return a family of DeepSeek with tags that say which values are strings."""
    return ChatFamily(
        name,
        XmlCalls(
            f"<｜DSML｜{block}>",
            '<｜DSML｜parameter name="',
            '" string="true">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>",
            '\n<｜DSML｜invoke name="',
            '">\n',
            f"\n</｜DSML｜{block}>",
            json_key_end='" string="false">',
            separator="",
        ),
        signs=(("｜DSML｜", f"{block}>"),),
    )


FAMILIES = (
    ChatFamily(
        "harmony",
        ChannelCalls(),
        signs=(("<|channel|>", "<|message|>", "functions."),),
        aliases=("openai", "gpt_oss"),
        reasoning=_HARMONY_REASONING,
    ),
    ChatFamily(
        "deepseek_v3",
        NamedCalls(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            separator="\n",
        ),
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
        aliases=("deepseek_r1",),
    ),
    ChatFamily(
        "deepseek_v31",
        NamedCalls(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            separator="",
        ),
        signs=(("<｜tool▁calls▁begin｜>",),),
    ),
    _dsml_family("deepseek_v32", "function_calls"),
    _dsml_family("deepseek_v4", "tool_calls"),
    ChatFamily(
        "kimi_k2",
        NamedCalls(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            separator="",
            is_numbered=True,
        ),
        signs=(("<|tool_calls_section_begin|>",),),
    ),
    ChatFamily(
        "mistral",
        NamedCalls("[TOOL_CALLS]", name_end="[ARGS]", id_marker="[CALL_ID]", block_separator=""),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        aliases=("mistral_v11",),
        id_prefix="",
        id_length=9,
    ),
    ChatFamily(
        "mistral_v3",
        JsonCalls("[TOOL_CALLS]", "", "[", "]", separator=", "),
        signs=(("[TOOL_CALLS]",),),
        id_prefix="",
        id_length=9,
    ),
    ChatFamily(
        "command_r",
        JsonCalls(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "[\n    ",
            "\n]",
            ",\n    ",
            name_key="tool_name",
            arguments_key="parameters",
            ordinal_key="tool_call_id",
        ),
        signs=(("<|START_ACTION|>",),),
        aliases=("command_r7b", "command_a", "cohere", "cohere_command3"),
        reasoning=_COMMAND_REASONING,
        answer_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ChatFamily(
        "seed_oss",
        XmlCalls(
            "<seed:tool_call>",
            "<parameter=",
            ">",
            "</parameter>\n",
            "</function>\n",
            "\n<function=",
            ">\n",
            "</seed:tool_call>",
            block_separator="\n",
        ),
        signs=(("<seed:tool_call>", "<function="),),
        reasoning=ReasoningMarkers("<seed:think>", "</seed:think>"),
    ),
    ChatFamily(
        "minimax_m3",
        NestedCalls("]<]minimax[>["),
        signs=(("]<]minimax[>[",),),
        reasoning=ReasoningMarkers("<mm:think>", "</mm:think>"),
    ),
    ChatFamily(
        "minimax_m2",
        XmlCalls(
            "<minimax:tool_call>",
            '<parameter name="',
            '">',
            "</parameter>\n",
            "</invoke>",
            '\n<invoke name="',
            '">\n',
            "\n</minimax:tool_call>",
            separator="",
        ),
        signs=(("minimax:tool_call", "<invoke name="),),
    ),
    ChatFamily(
        "qwen3_coder",
        XmlCalls(
            "<tool_call>",
            "<parameter=",
            ">\n",
            "\n</parameter>\n",
            "</function>\n",
            "\n<function=",
            ">\n",
            "</tool_call>",
            block_separator="\n",
        ),
        signs=(("<tool_call>", "<function="),),
        aliases=("qwen3_xml", "qwen3_5", "nemotron3", "step3p5"),
    ),
    ChatFamily(
        "glm45",
        XmlCalls(
            "<tool_call>",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
            name_end="\n",
            block_separator="\n",
        ),
        signs=(("<tool_call>", "<arg_key>"),),
        aliases=("glm46", "glm47"),
    ),
    ChatFamily(
        "minimax_m1",
        JsonCalls("<tool_calls>", "</tool_calls>", "\n", "\n", "\n"),
        signs=(("<tool_calls>", "<beginning_of_sentence>"),),
        aliases=("minimax",),
    ),
    ChatFamily(
        "apriel",
        JsonCalls("<tool_calls>", "</tool_calls>", "[", "]", ", "),
        signs=(("<tool_calls>",),),
    ),
    HERMES,
    ChatFamily(
        "phi4_functools",
        JsonCalls("functools", "", "[", "]", ", ", other_begins=("<|tool_call|>",)),
        signs=(("functools[",),),
        aliases=("phi4_mini_json",),
        answer_markers=("<|/tool_call|>",),
    ),
    ChatFamily(
        "phi4_mini",
        JsonCalls("<|tool_call|>", "<|/tool_call|>", "[", "]", ", ", other_begins=("functools",)),
        signs=(("<|tool|>", "<|/tool|>"), ("<|tool_call|>", "<|/tool_call|>")),
        aliases=("phi4",),
        tool_list=ToolList.SYSTEM_FIELD,
    ),
    ChatFamily(
        "granite",
        JsonCalls("<|tool_call|>", "", "[", "]", ", ", other_begins=("<tool_call>",)),
        signs=(("<|tool_call|>", "<|start_of_role|>"),),
        aliases=("granite3",),
        answer_markers=("<response>", "</response>"),
    ),
    ChatFamily(
        "lfm2",
        PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>"),
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ChatFamily(
        "nemotron",
        JsonCalls("<TOOLCALL>", "</TOOLCALL>", "[", "]", ", "),
        signs=(("<TOOLCALL>",),),
        aliases=("nemotron_json", "nemotron_nano_v2"),
    ),
    ChatFamily(
        "gemma4",
        BracedCalls("<|tool_call>", "<tool_call|>", "call:", '<|"|>'),
        signs=(("<|tool_call>", "<tool_call|>"),),
        reasoning=ReasoningMarkers("<|channel>thought", "<channel|>"),
    ),
    ChatFamily("gigachat3", JsonCalls("<|function_call|>"), signs=(("<|function_call|>",),)),
    ChatFamily(
        "functionary_v3",
        NamedCalls("<function=", name_end=">", call_end="</function>", block_separator=""),
        signs=(("<function=", "</function>", "<|start_header_id|>"),),
    ),
    ChatFamily(
        "granite_20b_fc",
        JsonCalls("<function_call>", opening=" ", block_separator="\n"),
        signs=(("<function_call>",),),
        aliases=("granite-20b-fc",),
    ),
    ChatFamily(
        "xlam",
        JsonCalls("", "", "[", "]", ", "),
        signs=(("calls in a single JSON array",),),
    ),
    ChatFamily(
        "llama4_pythonic",
        PythonicCalls(other_begins=("<|python_start|>",)),
        signs=(("<|header_start|>", "[func_name1(param"),),
        answer_markers=("<|python_end|>",),
    ),
    ChatFamily(
        "pythonic",
        PythonicCalls(),
        signs=(("[func_name1(param",),),
        aliases=("llama3_pythonic",),
    ),
    ChatFamily(
        "llama4_json",
        JsonCalls(separator="; ", arguments_key="parameters", other_begins=("<|python_start|>",)),
        signs=(("<|header_start|>", '"parameters": '), ("<|python_start|>",)),
        aliases=("llama4",),
        answer_markers=("<|python_end|>",),
    ),
    ChatFamily(
        "llama3_json",
        JsonCalls(separator="; ", arguments_key="parameters", other_begins=("<|python_tag|>",)),
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters": ')),
        aliases=("llama3",),
    ),
    ChatFamily("smollm3", HERMES.calls, signs=(("named SmolLM, trained by Hugging Face", "<think>"),)),
    ChatFamily(
        "smollm2",
        JsonCalls("<tool_call>", "</tool_call>", "[", "]", ", "),
        signs=(("named SmolLM, trained by Hugging Face",),),
        tool_prompt=_SMOLLM2_PROMPT,
    ),
    GENERIC,
)
"""Families in the order in which a template is compared with their signs."""


def family_named(name: str) -> ChatFamily:
    """Return the family of a name or alias, such as vLLM's `--tool-call-parser` takes.

    Raises:
        ValueError: no family has the name.
    """
    for family in FAMILIES:
        if name in (family.name, *family.aliases):
            return family
    raise ValueError(f"tool_call_parser is {name!r}; it must be one of {', '.join(known_names())}")


def known_names() -> list[str]:
    """Return the names and aliases of all families, in order."""
    return sorted({name for family in FAMILIES for name in (family.name, *family.aliases)})
