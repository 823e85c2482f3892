"""Figures of the cost of what shows the service's work, and the switch in front of it."""

from pathlib import Path

import pytest

from bench.face_app import Switch
from bench.face_cost import Window, figures_of


def window(is_on: bool, cpu_s: float, num_tokens: float = 1000.0) -> Window:
    return Window(is_on, cpu_s, num_tokens, wall_s=1.0)


def test_a_pair_is_compared_in_either_order() -> None:
    pairs = [window(True, 1.1), window(False, 1.0), window(False, 2.0, 2000), window(True, 2.4, 2000)]
    figures = figures_of([*pairs, window(True, 1.0), window(False, 1.0)])
    assert figures["ratios"] == pytest.approx([1.1, 1.2, 1.0])
    assert figures["cpu_ratio"] == pytest.approx(1.1)
    assert figures["on_cpu_ms_per_1000_tokens"] == pytest.approx(1100)


def test_what_is_behind_the_switch_does_nothing_while_it_is_off(tmp_path: Path) -> None:
    class Shown:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def note(self, text: str) -> None:
            self.seen.append(text)

    switch, shown = Switch(tmp_path / "off"), Shown()
    switch.gate(Shown, "note", lambda *_: None)
    for is_on, text in ((True, "on"), (False, "off"), (True, "on again")):
        switch.is_on = is_on
        shown.note(text)
    assert shown.seen == ["on", "on again"]
