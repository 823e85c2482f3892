"""Generator of docs/configuration.md: `python -m serve_app.config_page > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from pydantic import ByteSize

from replicas.settings import settings_of
from serve_app.config import PARTS, HeadwayConfig
from serve_app.settings.by_band import FORMS

_INTRODUCTION = """# Configuration

Most servers need only these ten fields:

| field | set it |
|---|---|
"""
IMPORTANT = {
    "model": "to serve your own model",
    "max_model_len": "when prompts are shorter than the model allows: each sequence then needs less KV cache",
    "max_num_seqs": "higher for more tokens a second, lower for faster streams",
    "kv_cache_bytes": "on a CPU, when requests wait although slots are free",
    "gpu_memory_utilization": "on a GPU, when another program uses its memory, too",
    "num_replicas": "to the number of GPUs or machines that the model has",
    "max_replicas": "when the number of replicas is to follow the load",
    "slo": "when interactive streams are too slow beside batches",
    "api_key_file": "as soon as others can reach the port",
    "data_dir": "when files, batches and jobs belong on another disk",
}
"""Fields that most servers need, and when to set each."""
_FORMS = """
A field is an option of `headway serve` (`--max-num-seqs 64`), a line of its `--config` file (`max_num_seqs: 64`), and a
line under `args:` in a config file of Serve. `make serve ARGS=` and `serve run --name headway headway:build` take
`max_num_seqs=64`. A start refuses unknown fields, values outside their limits, and fields that contradict each other. A
size is a number of bytes, or has a unit: `2GiB`; so may whole numbers: `16k` is 16,000, `16K` 16,384.

This page is made from the code: `python -m serve_app.config_page > docs/configuration.md`.
"""
_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true`, `false`", "null": "`none`"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}


def page() -> str:
    """Return the page: the fields that most servers need, then one table for the deployment and for each part."""
    important = "\n".join(f"| `{name}` | {purpose} |" for name, purpose in IMPORTANT.items())
    tables = (line for title, names in sections().items() for line in _section(title, names))
    return "\n".join([f"{_INTRODUCTION}{important}\n{_FORMS}", *tables])


def sections() -> dict[str, list[str]]:
    """Return the names of the fields by the title of the part that declares them, the deployment's own first."""
    settings = {part: list(settings_of(part)) for part in PARTS}
    of_parts = {name for names in settings.values() for name in names}
    own = [name for name in HeadwayConfig.model_fields if name not in of_parts]
    return {_title(part): names for part, names in ((HeadwayConfig, own), *settings.items())}


def effect_of(name: str) -> str:
    """Return the docstring of a field, in one line."""
    return " ".join((HeadwayConfig.model_fields[name].description or "").split())


def default_text(name: str) -> str:
    """Return a field's default in the form in which an operator writes it."""
    return _default(name, HeadwayConfig.model_fields[name].default)


def form_of(name: str) -> str | None:
    """Return the form of a field with several numbers; None: the field has one value."""
    return FORMS.get(HeadwayConfig.model_fields[name].annotation)


def _title(part: type) -> str:
    return (part.__doc__ or "").splitlines()[0].split(";")[0].rstrip(".")


def _section(title: str, names: Iterable[str]) -> Iterator[str]:
    yield f"## {title}\n\n| field | default | values | effect |\n|---|---|---|---|"
    schema = HeadwayConfig.model_json_schema()
    for name in names:
        form = form_of(name)
        if form is not None:
            values = f"`{form}`"
        else:
            values = "size > 0" if name.endswith("_bytes") else _values(schema["properties"][name], schema["$defs"])
        yield f"| `{name}` | `{default_text(name)}` | {values} | {effect_of(name)} |"
    yield ""


def _default(name: str, value: object) -> str:
    match value:
        case None | bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case int() if name.endswith("_bytes"):
            return ByteSize(value).human_readable()
        case int() | float() if value == int(value):
            return str(int(value))
        case _:
            return str(value) or '""'


def _values(schema: dict[str, Any], named: dict[str, Any]) -> str:
    """Return a description of the values that a JSON schema admits."""
    if "anyOf" in schema:
        return " or ".join(_values(option, named) for option in schema["anyOf"])
    if "$ref" in schema:
        return _values(named[schema["$ref"].rpartition("/")[2]], named)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = [f" {sign} {schema[rule]:g}" for rule, sign in _BOUNDS.items() if rule in schema]
    return _KINDS[schema["type"]] + ",".join(bounds)


if __name__ == "__main__":
    print(page(), end="")
