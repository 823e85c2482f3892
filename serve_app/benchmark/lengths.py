"""Distributions of token counts, written as text."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts within [low, high]: uniform, or log-normal around a median."""

    low: int
    high: int
    median: float | None = None
    """Median of the log-normal distribution; None: uniform."""
    sigma: float = 0.0
    """Deviation of the logarithm."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `N`, `LOW:HIGH` or `LOW:HIGH:MEDIAN:SIGMA`.

        Raises:
            ValueError: the text has another form, or the numbers contradict each other.
        """
        try:
            low, high, *shape = text.split(":") if ":" in text else (text, text)
            lengths = cls(int(low), int(high), *(float(number) for number in shape))
        except (ValueError, TypeError):
            raise ValueError(f"'{text}' is not of the form N, LOW:HIGH or LOW:HIGH:MEDIAN:SIGMA") from None
        if len(shape) not in (0, 2):
            raise ValueError(f"'{text}' has a median but no sigma, such as 16:2048:256:0.6")
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"'{text}' must have 1 <= low <= high; it has {lengths.low} and {lengths.high}")
        if lengths.median is not None and not (lengths.low <= lengths.median <= lengths.high and lengths.sigma >= 0):
            raise ValueError(f"'{text}' must have low <= median <= high and sigma >= 0")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Draw one count."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))
        return min(self.high, max(self.low, drawn))
