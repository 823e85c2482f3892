"""The outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """Whether one promise holds on the device."""

    name: str
    passed: bool
    detail: str
