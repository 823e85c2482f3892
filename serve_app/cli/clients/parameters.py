"""Parameters of the answers that `/set` changes in a chat: their names, fields and values."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from replicas.protocol import Band

_BAND = "band"
_BANDS = {band.name.lower(): int(band) for band in Band}
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_tokens",
    "seed": "seed",
    _BAND: "priority",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
}
"""Map from a parameter's name to its field of a request."""


class UnfitParameter(Exception):
    """Name or value of a parameter that does not exist. The message names those that do."""


def field_of(name: str) -> str:
    """Return the field of a request for a parameter.

    Raises:
        UnfitParameter: there is no such parameter; the message names the most similar one.
    """
    if name not in PARAMETERS:
        similar = get_close_matches(name, PARAMETERS, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(PARAMETERS)}"
        raise UnfitParameter(f"there is no parameter {name}; {hint}")
    return PARAMETERS[name]


def parameter_value(name: str, text: str) -> Any:
    """Return the value that a text stands for: a band, a JSON value, or else the text itself.

    The server checks the value, except for a band, whose names are Headway's.

    Raises:
        UnfitParameter: there is no such band.
    """
    if name == _BAND:
        if text not in _BANDS:
            raise UnfitParameter(f"band is {text}; it must be one of {', '.join(_BANDS)}")
        return _BANDS[text]
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # which JSON does not have, but Python reads
    except ValueError:
        return text
    return value


def parameter_text(name: str, value: Any) -> str:
    """Return a parameter's value as it is typed; None: the server's default."""
    if value is None:
        return "the server's default"
    return Band(value).name.lower() if name == _BAND else json.dumps(value, ensure_ascii=False)
