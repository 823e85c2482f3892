"""Outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check on the device."""

    name: str
    passed: bool
    detail: str
