"""Pass bars of an experiment: a limit, the measured value, and whether it is kept."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.record import write
from bench.routing.offer import Offered

VOID_EXIT_CODE = 3
"""Exit code of an experiment whose figures do not count."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `value` is at most (or at least) `limit`; None: it could not be measured, and fails."""

    name: str
    value: float | None
    limit: float
    is_lower_bound: bool = False

    @property
    def is_kept(self) -> bool:
        """True if the bar is kept."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.is_lower_bound else self.value <= self.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        bound = "at least" if self.is_lower_bound else "at most"
        return f"{'PASS' if self.is_kept else 'FAIL'}  {self.name}: {value} ({bound} {self.limit:g})"


def latency_bars(
    name: str, beside: str, figures: dict[str, Any], max_ttft_ratio: float | None, max_gap_ratio: float | None
) -> list[Bar]:
    """Return the bars on `compare_latencies` of a kind of replica; a limit of None gives no bar."""
    limits = {
        f"{name}: interactive TTFT p99, with {beside} / without": ("ttft_p99_ratio", max_ttft_ratio),
        f"{name}: interactive inter-token p99, ratio": ("gap_p99_ratio", max_gap_ratio),
    }
    return [Bar(bar, figures[key], limit) for bar, (key, limit) in limits.items() if limit is not None]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an experiment from its command line."""

    is_quick: bool
    settings: dict[str, str]
    """Configuration of the application, on top of the experiment's own."""
    has_throughput_profile: bool
    step_times: str
    seed: int
    kinds: tuple[str, ...] = ()
    """Kinds of replica to run on, of those that the experiment has; none: all."""
    checkout: str | None = None
    """Directory of the code to serve; None: this code."""

    def wants(self, kind: str) -> bool:
        """Return True if this kind of replica is to be measured."""
        return not self.kinds or kind in self.kinds


def option_parser(description: str | None, kinds: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of the options common to all experiments.

    `kinds` are the kinds of replica to choose from, if there are several.
    """

    def some(text: str) -> tuple[str, ...]:
        if unknown := [kind for kind in text.split(",") if kind not in kinds]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(kinds)}")
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(kinds=())
    parser.add_argument("--quick", action="store_true", help="a smoke version; its figures mean nothing")
    parser.add_argument(
        "--profile", choices=("default", "throughput"), default="default", help="tuning profile of Ray Serve"
    )
    parser.add_argument("--step-times", default="slow-gpu", help="step times of timed replicas, see bench.timed_app")
    parser.add_argument("--seed", type=int, default=0)
    if kinds:
        parser.add_argument("--kinds", type=some, help=f"some of {','.join(kinds)}, in a record of their own")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="configuration of the application")
    return parser


def read_options(description: str | None, arguments: Sequence[str] | None = None, kinds: Sequence[str] = ()) -> Options:
    """Parse the command line of an experiment without options of its own."""
    return options_of(option_parser(description, kinds).parse_args(arguments))


def options_of(parsed: argparse.Namespace) -> Options:
    """Return the common options of a parsed command line."""
    return Options(
        is_quick=parsed.quick,
        settings=dict(setting.split("=", 1) for setting in parsed.settings),
        has_throughput_profile=parsed.profile == "throughput",
        step_times=parsed.step_times,
        seed=parsed.seed,
        kinds=parsed.kinds,
    )


def report(
    name: str,
    options: Options,
    bars: Sequence[Bar],
    figures: dict[str, Any],
    loads: Sequence[Offered],
    family: str = "routing",
    void_because: str | None = None,
) -> int:
    """Print and record the bars; return the exit code: 0 all kept, 1 not, 3 void.

    The run is void if a load was, or for the reason `void_because`. The record is called `family`_`name`, the names of
    the module, followed by the chosen kinds. A quick run is recorded among temporary files, not with the results.
    """
    if any(load.summary["is_void"] for load in loads):
        void_because = "the load generator was late too often"
    print(f"\n{family}: {name}")
    for bar in bars:
        print(f"  {bar}")
    if void_because is not None:
        print(f"  VOID: {void_because}; nothing above counts")
    record = "_".join([family, name, *options.kinds])
    place = str(Path(tempfile.gettempdir()) / f"{record}_quick") if options.is_quick else record
    path = write(
        place,
        {
            "is_void": void_because is not None,
            "void_because": void_because,
            "options": asdict(options),
            "bars": [{**asdict(bar), "is_kept": bar.is_kept} for bar in bars],
            **figures,
            "loads": [load.summary for load in loads],
        },
    )
    print(f"  {path}")
    if void_because is not None:
        return VOID_EXIT_CODE
    return 0 if all(bar.is_kept for bar in bars) else 1
