"""Chat templates rendered as transformers renders them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

JsonObject = dict[str, Any]

TOOL_OBJECTS: list[JsonObject] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "city"},
                    "days": {"type": "integer", "description": "days"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum",
            "parameters": {
                "type": "object",
                "properties": {
                    "xs": {"type": "array", "items": {"type": "number"}, "description": "numbers"},
                    "note": {"type": "object", "description": "note"},
                },
                "required": ["xs"],
            },
        },
    },
]


def renderer(template: str) -> Callable[..., str]:
    """Return a function that renders messages and tools, with `add_generation_prompt` or without."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: "today"
    compiled = environment.from_string(template)

    def render(
        messages: list[JsonObject], tools: Sequence[JsonObject] = (), add_generation_prompt: bool = False
    ) -> str:
        return compiled.render(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            bos_token="<BOS>",
            eos_token="<EOS>",
        )

    return render


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)
