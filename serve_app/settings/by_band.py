"""Settings of several numbers: for each band, or for two cases. Each has a form in text and one in YAML.

In text the numbers of a band are separated by slashes and the bands by commas: `interactive=1/0.06,batch=none`. In YAML
they are lists in a mapping: `{interactive: [1, 0.06], batch: none}`. A band that is not named keeps its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from replicas.protocol import Auto, Band
from router.scaling.autoscaling import DownscaleDelay
from router.types import LatencyTargets

_Number = float | Auto | None
_BANDS = tuple(band.name.lower() for band in Band)


def as_text(value: object) -> str:
    """Return a value of YAML as in text."""
    match value:
        case None:
            return "none"
        case Auto():
            return str(value.value)
        case Mapping():
            return ",".join(f"{band}={as_text(numbers)}" for band, numbers in value.items())
        case list() | tuple():
            return "/".join(map(as_text, value))
        case float() if value.is_integer():
            return str(int(value))
        case _:
            return str(value)


@dataclass(frozen=True, slots=True)
class _BandNumbers:
    """Names and bounds of the numbers that a setting has for each band."""

    setting: str
    names: tuple[str, ...]
    are_whole: bool = False
    """True: whole numbers from 1; False: numbers above 0, or None."""
    auto: str = ""
    """Name of the number that may be `auto`; empty: none."""

    def check(self, band: str, *numbers: _Number) -> None:
        """Check the numbers of a band.

        Raises:
            ValueError: a number is out of bounds; the message names the setting, the band, the number and the bound.
        """
        for name, number in zip(self.names, numbers, strict=True):
            if number is None or number is Auto.AUTO:
                is_valid = not self.are_whole if number is None else name == self.auto
            else:
                is_valid = number > 0 and (not self.are_whole or number == number // 1)
            if not is_valid:
                raise self._error(band, name, as_text(number))

    def read(self, given: object) -> dict[str, list[Any]]:
        """Return the numbers of each band that is named, checked, from either form.

        Raises:
            ValueError: the form is another, or a number is out of bounds.
        """
        bands = _bands_of(given) if isinstance(given, str) else given
        if not isinstance(bands, Mapping) or not bands or bands.keys() - set(_BANDS):
            example = f"{_BANDS[0]}={'/'.join(self.names)}"
            raise ValueError(
                f"{self.setting} is `{as_text(given)}`; it must name bands, each once, such as `{example}`"
            )
        rows = {band: self._numbers(band, as_text(numbers)) for band, numbers in bands.items()}
        for band, row in rows.items():
            self.check(band, *row)
        return rows

    def _numbers(self, band: str, text: str) -> list[_Number]:
        words = text.split("/")
        if words == ["none"]:
            words *= len(self.names)
        if len(words) != len(self.names):
            raise ValueError(f"{self.setting} of {band} is `{text}`; it must be `{'/'.join(self.names)}`")
        return [self._number(band, name, word) for name, word in zip(self.names, words, strict=True)]

    def _number(self, band: str, name: str, word: str) -> _Number:
        if name == self.auto and word.lower() == "auto":
            return Auto.AUTO
        try:
            return None if word.lower() == "none" else float(word)
        except ValueError:
            raise self._error(band, name, word) from None

    def _error(self, band: str, name: str, value: str) -> ValueError:
        bound = "a whole number of at least 1" if self.are_whole else "a number above 0, or none"
        bound += ", or auto" if name == self.auto else ""
        return ValueError(f"{self.setting} of {band}: {name} is {value}; it must be {bound}")


def _bands_of(text: str) -> dict[str, str]:
    """Return the text of each band; empty: a band is named twice."""
    pairs = [(band.strip(), numbers.strip()) for band, _, numbers in (part.partition("=") for part in text.split(","))]
    return dict(pairs) if len(dict(pairs)) == len(pairs) else {}


_TARGETS = _BandNumbers("slo", ("ttft_s", "tpot_s"), auto="tpot_s")
_QUEUES = _BandNumbers("max_queue", ("requests", "tokens"), are_whole=True)
_WAITS = _BandNumbers("max_wait_s", ("seconds",))


@dataclass(frozen=True, slots=True)
class BandTargets:
    """Latency targets of each band."""

    interactive: LatencyTargets = field(default=LatencyTargets(1.0, Auto.AUTO))
    standard: LatencyTargets = field(default=LatencyTargets(5.0, 0.25))
    batch: LatencyTargets = field(default=LatencyTargets())

    def __post_init__(self) -> None:
        for band, targets in self.by_band().items():
            _TARGETS.check(band.name.lower(), targets.ttft_s, targets.tpot_s)

    @classmethod
    def read(cls, given: object) -> BandTargets:
        """Read the setting `slo`.

        Raises:
            ValueError: naming what is wrong.
        """
        if isinstance(given, cls):
            return given
        return replace(cls(), **{band: LatencyTargets(*row) for band, row in _TARGETS.read(given).items()})

    def by_band(self) -> dict[Band, LatencyTargets]:
        """Return the targets by band."""
        return {Band.INTERACTIVE: self.interactive, Band.STANDARD: self.standard, Band.BATCH: self.batch}

    def __str__(self) -> str:
        rows = {band.name.lower(): [targets.ttft_s, targets.tpot_s] for band, targets in self.by_band().items()}
        return as_text({band: None if row == [None, None] else row for band, row in rows.items()})


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Limit of the queue of one band in one ingress."""

    max_requests: int
    max_tokens: int
    """Most tokens that may wait: prompt tokens plus expected output tokens."""


@dataclass(frozen=True, slots=True)
class BandQueues:
    """Limits of the queue of each band in one ingress."""

    interactive: QueueLimit = QueueLimit(1024, 4_000_000)
    standard: QueueLimit = QueueLimit(1024, 4_000_000)
    batch: QueueLimit = QueueLimit(16_384, 64_000_000)

    def __post_init__(self) -> None:
        for band, limit in self.by_band().items():
            _QUEUES.check(band.name.lower(), limit.max_requests, limit.max_tokens)

    @classmethod
    def read(cls, given: object) -> BandQueues:
        """Read the setting `max_queue`.

        Raises:
            ValueError: naming what is wrong.
        """
        if isinstance(given, cls):
            return given
        rows = {
            band: [int(number) for number in row if number is not None] for band, row in _QUEUES.read(given).items()
        }
        return replace(cls(), **{band: QueueLimit(*row) for band, row in rows.items()})

    def by_band(self) -> dict[Band, QueueLimit]:
        """Return the limits by band."""
        return {Band.INTERACTIVE: self.interactive, Band.STANDARD: self.standard, Band.BATCH: self.batch}

    def __str__(self) -> str:
        return as_text(
            {band.name.lower(): [each.max_requests, each.max_tokens] for band, each in self.by_band().items()}
        )


@dataclass(frozen=True, slots=True)
class BandWaits:
    """Longest predicted wait of a request of each band, seconds; None: no limit."""

    interactive: float | None = 10.0
    standard: float | None = 60.0
    batch: float | None = None

    def __post_init__(self) -> None:
        for band, wait_s in self.by_band().items():
            _WAITS.check(band.name.lower(), wait_s)

    @classmethod
    def read(cls, given: object) -> BandWaits:
        """Read the setting `max_wait_s`.

        Raises:
            ValueError: naming what is wrong.
        """
        if isinstance(given, cls):
            return given
        return replace(cls(), **{band: wait_s for band, (wait_s,) in _WAITS.read(given).items()})

    def by_band(self) -> dict[Band, float | None]:
        """Return the waits by band."""
        return {Band.INTERACTIVE: self.interactive, Band.STANDARD: self.standard, Band.BATCH: self.batch}

    def __str__(self) -> str:
        return as_text({band.name.lower(): wait_s for band, wait_s in self.by_band().items()})


def read_downscale_delay(given: object) -> DownscaleDelay:
    """Read the setting `downscale_delay_s`: one number, or two with a slash or in a list.

    Raises:
        ValueError: naming what is wrong.
    """
    if isinstance(given, DownscaleDelay):
        return given
    text = as_text(given)
    try:
        delays_s = [float(word) for word in text.split("/")]
    except ValueError:
        delays_s = []
    if len(delays_s) not in (1, 2):
        raise ValueError(f"downscale_delay_s is `{text}`; it must be a number of seconds, or two with a slash")
    return DownscaleDelay(*delays_s)


FORMS: Mapping[object, str] = {
    BandTargets: "BAND=TTFT_S/TPOT_S,...",
    BandQueues: "BAND=REQUESTS/TOKENS,...",
    BandWaits: "BAND=SECONDS,...",
    DownscaleDelay: "SECONDS or SECONDS/SECONDS",
}
"""Form in text of the settings of each type."""
