"""Figures for people are rounded and have their units."""

import pytest

from serve_app.cli.clients.terminal import counted, duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (130.07859369789648, "2 min 10 s"), (3_600, "1 h"),
     (3_725, "1 h 2 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(number, "replica") for number in (0, 1, 1200)] == ["0 replicas", "1 replica", "1,200 replicas"]
    assert counted(2, "batch") == "2 batches"
