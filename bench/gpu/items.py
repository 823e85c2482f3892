"""Items of the check on a device, in groups that share a process, and the file of their outcomes."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.record import cell, ratio
from replicas.model.loading.options import Device

ITEM_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run of an item."""

    passed: bool | None
    """None: there is nothing to pass. The item measures, or it is not for this device."""
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Item:
    """One check or measurement."""

    name: str
    run: Callable[[], Outcome]
    advice: str = ""
    """Advice for the case that it fails: the setting that avoids the fault, and the place to look at."""
    limit_s: float = ITEM_LIMIT_S
    """Most seconds that it may take; it is killed then."""


@dataclass(frozen=True, slots=True)
class Group:
    """Items that run in one process, in order; a fault that spoils the process spoils no other group."""

    part: str
    name: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """Device and size of a run."""

    device: Device
    is_tiny: bool = False
    """True: the smallest cases, so that every item runs on a processor too."""
    output: Path = Path()
    """Folder of files that items leave, such as traces."""


GroupList = Callable[[Target], tuple[Group, ...]]


def group_list(place: str) -> GroupList:
    """Return the function that `module:function` names."""
    module, _, name = place.partition(":")
    found: GroupList = getattr(importlib.import_module(module), name)
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """Line of the file of outcomes."""

    group: str
    item: str
    passed: bool | None
    detail: str
    seconds: float = 0.0
    is_blocking: bool = False
    """True: a repetition with launches that wait, so that an error is raised where it arises."""
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Line of text for a person."""
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.passed]
        again = " (again, with blocking launches)" if self.is_blocking else ""
        advice = f"\n      advice: {self.advice}" if self.passed is False and self.advice else ""
        return f"{mark}  {self.group}/{self.item}{again}: {self.detail}{advice}"


class OutcomeFile:
    """File of outcomes, one line of JSON each. It holds every outcome that was known when a process was killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Line) -> None:
        """Write a line to the disk."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[Line]:
        """Return the whole lines."""
        if not self.path.exists():
            return []
        return [Line(**json.loads(text)) for text in self.path.read_text().splitlines(True) if text.endswith("\n")]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figure of the check that was computed before anybody measured it."""

    figure: str
    value: float
    bar: float
    """Most that it may be."""
    formula: str


def read_predictions(path: Path) -> list[Prediction]:
    """Return the predictions of a file."""
    return [Prediction(**entry) for entry in json.loads(path.read_text())["predictions"]]


def compared(now: Sequence[Line], then: Sequence[Line], predictions: Sequence[Prediction] = ()) -> Iterator[str]:
    """Yield a line for each figure of this run that a former run or a prediction has, with them and the ratios."""
    former, by_figure = figures_of(then), {prediction.figure: prediction for prediction in predictions}
    for name, value in figures_of(now).items():
        parts = [f"then {former[name]:g} ({cell(ratio(value, former[name]), '.2f')})"] if name in former else []
        if name in by_figure:
            predicted = by_figure[name]
            parts.append(
                f"predicted {predicted.value:g} ({cell(ratio(value, predicted.value), '.2f')}), bar {predicted.bar:g}"
            )
        if parts:
            yield f"{name}: {value:g}, {', '.join(parts)}"


def figures_of(lines: Sequence[Line]) -> dict[str, float]:
    """Return all numbers among the figures of a run by their names."""
    return dict(numbers for line in lines for numbers in _numbers(f"{line.group}/{line.item}", line.figures))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers within a figure with their places.

    An item of a list is named by its texts; by its index where it has none, and by both where others have the same.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name} {key}", inner)
    elif isinstance(value, list):
        labels = [_label(item) for item in value]
        for index, (item, label) in enumerate(zip(value, labels, strict=True)):
            is_unique = label and labels.count(label) == 1
            yield from _numbers(f"{name} {label if is_unique else f'{label} {index}'.strip()}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _label(item: Any) -> str:
    return " ".join(text for text in item.values() if isinstance(text, str)) if isinstance(item, dict) else ""
