"""Settings: the dataclass fields that an operator chooses, each declared in the layer that uses it."""

from __future__ import annotations

import operator
from dataclasses import field, fields
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_BOUNDS = "bounds"
_RULES = {"ge": (operator.ge, "at least"), "gt": (operator.gt, "above"), "le": (operator.le, "at most")}


class Setting(NamedTuple):
    """Default and bounds of a setting."""

    default: Any
    bounds: dict[str, Any]


def setting(default: T, **bounds: float) -> T:
    """Declare a dataclass field as a setting: an operator may choose its value.

    The field is the only place of the default, the bounds (`ge`, `gt`, `le`; None is not checked) and the docstring
    below it. A field that is declared without `setting` gets its value from the code that makes the object.
    """
    assert bounds.keys() <= _RULES.keys()
    return field(default=default, metadata={_BOUNDS: bounds})


def settings_of(part: type) -> dict[str, Setting]:
    """Return the settings that a dataclass declares, by name."""
    return {entry.name: Setting(entry.default, entry.metadata[_BOUNDS]) for entry in fields(part) if entry.metadata}


def check_bounds(part: Any) -> None:
    """Check the settings of a dataclass instance against their bounds.

    Raises:
        ValueError: a value is out of bounds; the message names the setting, its value and the bound.
    """
    for name, (_, bounds) in settings_of(type(part)).items():
        value = getattr(part, name)
        for rule, bound in bounds.items():
            holds, words = _RULES[rule]
            if value is not None and not holds(value, bound):
                raise ValueError(f"{name} is {value}; it must be {words} {bound:g}")
