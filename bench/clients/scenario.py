"""Questions of the sweep, and the scripts of the model that answers them.

Scripts for the same object have different ages, since each of a checkpoint's values is a token of its own.
"""

from __future__ import annotations

from typing import Any

from testkit.model.scripted_checkpoint import Script

MODEL = "scripted"
GREETING = "Hello from Headway."
WEATHER = "It is sunny in Paris, with 18 degrees."
IN_ROME = "It is warm in Rome."
IN_OSLO = "It is cold in Oslo."
OF_HELPER = "The helper says hello."
REPAIRED = "The sum was a difference. The file is repaired, and its test passes."

SCENARIO: dict[str, Any] = {
    "model": MODEL,
    "greeting": {"question": "Say hello.", "answer": GREETING},
    "weather": {
        "question": "What is the weather in Paris?",
        "city": "Paris",
        "result": "18 degrees and sunny",
        "answer": WEATHER,
    },
    # For agents that want the answer itself as a call.
    "called": {"question": "What is the weather in Rome?", "city": "Rome", "result": "21 degrees", "answer": IN_ROME},
    # For agents that have the steps written as text.
    "stepwise": {"question": "What is the weather in Oslo?", "city": "Oslo", "result": "-3 degrees", "answer": IN_OSLO},
    # For coding agents: a file to edit, and its test.
    "coding": {
        "question": "Repair calc.py and run its test.",
        "name": "calc.py",
        "files": {
            "calc.py": "def add(a, b):\n    return a - b\n",
            "test_calc.py": "from calc import add\n\nassert add(2, 3) == 5\nprint('5 is', 'the sum')\n",
        },
        "repaired": "def add(a, b):\n    return a + b\n",
        "answer": REPAIRED,
    },
    # Codex's own prompt has words of other questions.
    "codex": {
        "greeting": "Greet me, Codex.",
        "person": "Codex, read off who it is: Ada Lovelace.",
        "task": "Mend calc.py and run its test.",
    },
    "handoff": {"question": "Ask the helper.", "agent": "Helper", "answer": OF_HELPER},
    "documents": ["The sea is deep.", "A mountain is high.", "Rain falls on the plain."],
    "person": {"question": "Extract the person: Ada Lovelace.", "name": "Ada Lovelace", "ages": [36, 37, 38, 39, 40]},
}
"""Questions and answers that the programs get."""


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _fields(**fields: str) -> str:
    parts = [f"[[ ## {name} ## ]]\n{text}" for name, text in (*fields.items(), ("completed", ""))]
    return "\n\n".join(parts).strip()


SCRIPTS = (
    Script(GREETING),
    Script(_call("get_weather", '{"city": "Paris"}'), ("weather in Paris",)),
    Script(WEATHER, ("18 degrees",), rank=1),
    Script('{"name": "Ada Lovelace", "age": 36}', ("Extract the person",)),
    # Clients that get an object as the arguments of a call name the function like the class, or as they please.
    Script(_call("Person", '{"name": "Ada Lovelace", "age": 37}'), ("Person",), rank=2),
    Script(_call("get_weather", '{"city": "Rome"}'), ("weather in Rome",)),
    Script(_call("final_answer", f'{{"answer": "{IN_ROME}"}}'), ("21 degrees",), rank=1),
    # DSPy's format.
    Script(_fields(answer=GREETING), ("[[ ## answer ## ]]",), rank=1),
    Script(_fields(person='{"name": "Ada Lovelace", "age": 39}'), ("[[ ## person ## ]]",), rank=3),
    Script(
        _fields(next_thought="I ask.", next_tool_name="get_weather", next_tool_args='{"city": "Oslo"}'),
        ("[[ ## next_tool_name ## ]]",),
        rank=2,
    ),
    Script(_fields(next_thought="I know.", next_tool_name="finish", next_tool_args="{}"), ("-3 degrees",), rank=3),
    Script(_fields(reasoning="It is so.", answer=IN_OSLO), ("[[ ## reasoning ## ]]",), rank=4),
    # Claude Code's tools.
    Script(_call("Read", '{"file_path": "calc.py"}'), ("Repair calc.py",)),
    Script(
        _call("Edit", '{"file_path": "calc.py", "old_string": "a - b", "new_string": "a + b"}'),
        ("def add(a, b)",),
        rank=1,
    ),
    Script(_call("Bash", '{"command": "python3 test_calc.py"}'), ("has been updated",), rank=2),
    # Codex's tools.
    Script(GREETING, ("Greet me, Codex",), rank=3),
    Script('{"name": "Ada Lovelace", "age": 40}', ("read off who it is",), rank=3),
    Script(_call("exec_command", '{"cmd": "sed -i s/-/+/ calc.py && echo mended"}'), ("Mend calc.py",), rank=3),
    Script(_call("exec_command", '{"cmd": "python3 test_calc.py"}'), ("echo mended",), rank=4),
    Script(REPAIRED, ("5 is the sum",), rank=5),
    # Agents that hand a conversation to another one.
    Script(_call("transfer_to_helper", "{}"), ("Ask the helper",)),
    Script(OF_HELPER, ('"assistant": "Helper"',), rank=1),
    Script(_call("final_result", '{"name": "Ada Lovelace", "age": 38}'), ("final_result",), rank=2),
)
