"""Real chat templates: llama.cpp's collection, from the source archive of llama-cpp-python.

A history is rendered by a template. The turn with the calls, cut out of the text, is parsed back.
"""

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.openai.tools.detection import detect, probed
from serve_app.openai.tools.families import ChatFamily, ToolList
from serve_app.openai.tools.grammar import Thinking, thinking_of
from serve_app.openai.tools.messages import prompt_messages
from serve_app.openai.tools.shapes.calls import Tool
from tests.unit.openai.tools.cases import Parsed, parse
from tests.unit.openai.tools.rendering import TOOL_OBJECTS, JsonObject

pytestmark = pytest.mark.deep

VERSION = "0.3.36"
DOWNLOAD_LIMIT_S = 400
CACHE = Path.home() / ".cache" / "headway" / "chat-templates" / VERSION
FAMILIES = {
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "command_r",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_r",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "GigaChat3.1-10B-A1.8B": "gigachat3",
    "HuggingFaceTB-SmolLM3-3B": "smollm3",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "minimax_m1",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": "minimax_m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm45",
    "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm45",
    "llama-cpp-rwkv-world": "generic",
    "meetkai-functionary-medium-v3.1": "functionary_v3",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "microsoft-Phi-3.5-mini-instruct": "generic",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_v3",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "harmony",
    "poolside-Laguna-S-2.1": "glm45",
    "poolside-Laguna-XS-2.1": "glm45",
    "poolside-Laguna-XS.2": "glm45",
    "unsloth-Apriel-1.5": "apriel",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
TOKENS = {"LFM2.5-Instruct": ["<|tool_call_start|>", "<|tool_call_end|>"]}
"""Added tokens of models whose templates alone do not show their family."""
ONE_CALL = {
    "GigaChat3.1-10B-A1.8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
}
"""Templates that take one call a turn."""
OWN_FORM = {
    "Apertus-8B-Instruct",
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "GigaChat3-10B-A1.8B",
    "Kimi-K3",
    "meetkai-functionary-medium-v3.2",
    "muse-glimmer",
    "openbmb-MiniCPM5-1B",
    "tencent-Hy3",
    "upstage-Solar-Open-100B",
}
"""Templates with a form of calls that no family has."""
REFUSED = {"fireworks-ai-llama-3-firefunction-v2", "google-gemma-2-2b-it", "llama-cpp-deepseek-r1"}
"""Templates that want tools under another name, refuse a system message, or that transformers cannot render."""
NO_PROMPT = {"fireworks-ai-llama-3-firefunction-v2", "CohereForAI-c4ai-command-r-plus-tool_use"}
"""Templates that cannot be rendered with these tools."""
OTHER_BEGIN = {
    name
    for name in FAMILIES
    if FAMILIES[name].startswith("mistral") and name != "mistralai-Ministral-3-14B-Reasoning-2512"
}
"""Templates that write the tools before the user's last turn."""
SYSTEM_AT_THE_END = {"mistralai-Mistral-Nemo-Instruct-2407"}
"""Template that writes the first system message into the user's last turn, and nowhere if that is not the last one."""
FUNCTIONS: list[JsonObject] = [each["function"] for each in TOOL_OBJECTS]
TOOLS = [Tool(each["name"], each["parameters"]) for each in FUNCTIONS]
ARGUMENTS: list[JsonObject] = [{"city": 'Zürich "x" <b>\n東京', "days": 3}, {"xs": [1, 2.5], "note": {"k": "a\nb {"}}]


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    if not CACHE.is_dir():
        download()
    return {path.stem: path.read_text() for path in sorted(CACHE.glob("*.jinja"))}


def download() -> None:
    """Put the templates into the cache, or skip the tests."""
    folder = CACHE.parent / f"{VERSION}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    try:
        subprocess.run(
            [*command, f"llama-cpp-python=={VERSION}"], check=True, capture_output=True, timeout=DOWNLOAD_LIMIT_S
        )
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"the source archive of llama-cpp-python {VERSION} cannot be had: {error}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if "/vendor/llama.cpp/models/templates/" in member.name and member.name.endswith(".jinja"):
                content = files.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())
    archive.unlink()
    folder.rename(CACHE)


def test_every_template_is_accounted_for(templates: dict[str, str]) -> None:
    assert set(templates) == {*FAMILIES, *OWN_FORM, *REFUSED}


@pytest.mark.parametrize("name", sorted(OWN_FORM))
def test_a_form_that_no_family_has_is_not_taken_for_another(templates: dict[str, str], name: str) -> None:
    assert detect(templates[name]).name == "generic"


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_a_template_renders_parse_back(templates: dict[str, str], name: str) -> None:
    conversation = Conversation(templates[name], TOKENS.get(name, []))
    assert conversation.family.name == FAMILIES[name]
    num_calls = 1 if name in ONE_CALL else 2
    for pieces_of in (as_lines, list):
        parsed = conversation.parsed_calls(num_calls, pieces_of)
        expected = zip(TOOLS[:num_calls], ARGUMENTS[:num_calls], strict=True)
        assert parsed.calls == [(tool.name, arguments) for tool, arguments in expected]
        assert parsed.kinds[0] == "CallBegin" and parsed.num_malformed == 0
        answer = conversation.parsed_answer(num_calls, pieces_of)
        assert "It is sunny." in answer.content and answer.kinds == ["Content"]
    assert "the_result" in conversation.prompt_of_answer(num_calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_instructions_and_tools_reach_the_prompt(templates: dict[str, str], name: str) -> None:
    conversation = Conversation(templates[name], TOKENS.get(name, []))
    turns = [{"role": "developer", "content": "In French."}, {"role": "user", "content": "hi"}]
    assert "In French." in conversation.prompt(turns)
    prompt = conversation.prompt([{"role": "system", "content": "Be brief."}, *turns])
    assert "Be brief." in prompt and "In French." in prompt and "get_weather" in prompt


def test_a_system_message_may_stand_anywhere_and_changes_no_earlier_text(templates: dict[str, str]) -> None:
    for name in sorted({*FAMILIES, *OWN_FORM, *REFUSED} - NO_PROMPT):
        conversation = Conversation(templates[name], TOKENS.get(name, []))
        for turns, num_sent in agent_conversations():
            sent, prompt = (conversation.prompt(turns[:number]) for number in (num_sent, len(turns)))
            texts = [turn["content"] for turn in turns if turn["content"]][name in SYSTEM_AT_THE_END :]
            places = [prompt.rfind(text) for text in texts]
            assert -1 not in places and places == sorted(places), (name, prompt)
            # Templates write an answer with its reasoning as long as it is the last one.
            end = sent.rindex("the_reminder" if num_sent == 3 else "the_question")
            assert name in OTHER_BEGIN or prompt.startswith(sent[:end]), (name, sent, prompt)


def agent_conversations() -> Iterator[tuple[list[JsonObject], int]]:
    """Yield conversations with a reminder of the system, and how many of their messages were sent before."""
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "abcdef123", "type": "function", "function": function}
    calling: JsonObject = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "the_result"}
    answer = {"role": "assistant", "content": "the_answer"}
    user, again = ({"role": "user", "content": text} for text in ("the_question", "the_next"))
    for role in ("system", "developer"):
        head = [{"role": "system", "content": "the_rules"}, user]
        reminder = {"role": role, "content": "the_reminder"}
        yield [*head, reminder, calling, result], 3
        yield [*head, reminder, {**reminder, "content": "the_second"}, answer, again], 3
        yield [*head, reminder, again], 3
        yield [*head, answer, reminder, again], 4
        yield [*head, calling, result, reminder, answer, again], 5
        yield [*head, calling, result, again, answer, reminder, user | {"content": "the_last"}], 5


def num_shared(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def as_lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


class Conversation:
    """A question, calls, their results, and the answer, rendered by one template."""

    def __init__(self, template: str, tokens: list[str]) -> None:
        self._template = template
        self.family: ChatFamily = probed(detect(template, tokens), self._render)

    def parsed_calls(self, num_calls: int, pieces_of: Callable[[str], list[str]]) -> Parsed:
        """Parse the turn with calls."""
        return self._parsed_turn(self._messages(num_calls)[:2], pieces_of)

    def parsed_answer(self, num_calls: int, pieces_of: Callable[[str], list[str]]) -> Parsed:
        """Parse the answer after the results."""
        return self._parsed_turn(self._messages(num_calls), pieces_of)

    def prompt_of_answer(self, num_calls: int) -> str:
        """Return the prompt of the answer after the calls and their results."""
        return self.prompt(self._messages(num_calls)[:-1])

    def prompt(self, messages: list[JsonObject]) -> str:
        """Return the prompt of messages and tools."""
        return self._rendered(messages, True)

    def _parsed_turn(self, messages: list[JsonObject], pieces_of: Callable[[str], list[str]]) -> Parsed:
        """Parse the last turn, cut out of the text behind what the prompt has too."""
        prompt, text = self._rendered(messages[:-1], True), self._rendered(messages, False)
        shared = text[: num_shared(prompt, text)]
        # A marker is not cut in two.
        begin = max(shared.rfind("<"), shared.rfind("["))
        if begin >= 0 and not (">" in shared[begin:] or "]" in shared[begin:]):
            shared = shared[:begin]
        turn = text[len(shared) :]
        reasoning = self.family.reasoning
        thinking = thinking_of(self.family, prompt)
        if reasoning and thinking is Thinking.NONE:
            turn = turn.removeprefix(
                reasoning.end
            )  # DeepSeek V3.2: the prompt has `<think></think>`, the history its end.
        is_open = thinking is Thinking.OPEN and reasoning is not None
        in_reasoning = bool(is_open and reasoning and reasoning.end in turn)
        return parse(self.family, pieces_of(turn), tools=TOOLS, in_reasoning=in_reasoning)

    def _rendered(self, messages: list[JsonObject], add_generation_prompt: bool) -> str:
        tools = TOOL_OBJECTS if self.family.tool_list is ToolList.TEMPLATE else []
        return self._render(prompt_messages(self.family, messages, TOOL_OBJECTS), tools, add_generation_prompt)

    def _render(self, messages: list[JsonObject], tools: list[JsonObject], add_generation_prompt: bool = False) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            [messages],
            tools=tools or None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            bos_token="",
            eos_token="",
        )
        return str(rendered[0])

    def _messages(self, num_calls: int) -> list[JsonObject]:
        calls = [
            {
                "id": f"abcdef12{number}",
                "type": "function",
                "function": {"name": tool.name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (tool, arguments) in enumerate(zip(TOOLS, ARGUMENTS, strict=True))
        ][:num_calls]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "the_result"} for call in calls]
        return [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *results,
            {"role": "assistant", "content": "It is sunny."},
        ]
