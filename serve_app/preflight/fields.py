"""Fields of a configuration from a command line or a file: read and checked, with one line for all mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pydantic

from serve_app.config import HeadwayConfig


class ConfigError(Exception):
    """Mistake in an option, an argument or a config file; the message names it."""


def read_fields(fields: Mapping[str, Any]) -> HeadwayConfig:
    """Return the configuration with these fields; a value may be a text, as on a command line.

    Raises:
        ConfigError: naming each mistake, and the most similar field in place of one that does not exist.
    """
    try:
        return HeadwayConfig.model_validate(dict(fields))
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_problems(error))) from None


def _problems(error: pydantic.ValidationError) -> Iterator[str]:
    for problem in error.errors():
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            yield unknown_field(name, HeadwayConfig.model_fields)
        else:
            yield f"{name}: {problem['msg']}".removeprefix(": ").replace("Value error, ", "")


def unknown_field(name: str, known: Iterable[str]) -> str:
    """Return the message for a field that does not exist, with the most similar one that does."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"there is no field {name}" + (f"; did you mean {similar[0]}?" if similar else "")
