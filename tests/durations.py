"""Processor and wall seconds of each slow test module, at the end of a run.

`--module-durations=0` shows every module.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass

import pytest

_SLOW_S = 20.0
_FIELD = "cost"


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor and wall seconds."""

    cpu_s: float
    """User and system time of this process, and of the child processes that it has waited for."""
    wall_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)

    @classmethod
    def until_now(cls) -> Cost:
        """Read the process's processor time and the clock."""
        times = os.times()
        cpu_s = times.user + times.system + times.children_user + times.children_system
        return cls(cpu_s, time.monotonic())


class ModuleDurations:
    """Plugin that measures each phase of each test in its process, and adds up by module in the main process."""

    def __init__(self, shown_s: float) -> None:
        self._shown_s = shown_s
        self._last = Cost.until_now()
        self._by_module: defaultdict[str, Cost] = defaultdict(lambda: Cost(0.0, 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = Cost.until_now()
        cost, self._last = now - self._last, now
        setattr(report, _FIELD, (cost.cpu_s, cost.wall_s))  # plain: xdist sends it to the process that adds up
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._last = Cost.until_now()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_module[report.nodeid.partition("::")[0]] += Cost(*getattr(report, _FIELD, (0.0, 0.0)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slow = [(cost, module) for module, cost in self._by_module.items() if cost.cpu_s + cost.wall_s >= self._shown_s]
        if not slow:
            return
        terminalreporter.section(f"modules of at least {self._shown_s:g} s: processor seconds, wall seconds")
        for cost, module in sorted(slow, key=lambda each: -each[0].cpu_s):
            terminalreporter.write_line(f"{cost.cpu_s:8.1f} {cost.wall_s:8.1f}  {module}")
        total = sum((cost for cost, _ in slow), Cost(0.0, 0.0))
        terminalreporter.write_line(f"{total.cpu_s:8.1f} {total.wall_s:8.1f}  in all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--module-durations",
        type=float,
        default=_SLOW_S,
        metavar="SECONDS",
        help="show modules that took at least this long",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ModuleDurations(config.getoption("--module-durations")), "module-durations")
