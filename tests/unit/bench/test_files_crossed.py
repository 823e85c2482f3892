"""Files that requests cross, from made-up traces, and the trace of one process."""

import json
import sys
from types import ModuleType

import pytest

from bench.call_trace import COMPUTING, INBOUND, OUTBOUND, Call, Switch, Tracer
from bench.files_crossed import IDLE, crossing

_MODULE = """
from dataclasses import dataclass

@dataclass
class Point:
    x: int

class Scheduler:
    def add(self):
        return Point(1)

class Step:
    def collect(self):
        return helper()

def helper():
    return 1
"""


def load(monkeypatch: pytest.MonkeyPatch, file: str) -> ModuleType:
    module = ModuleType("traced")
    module.__file__ = f"/code/{file}"
    monkeypatch.setitem(sys.modules, "traced", module)  # a dataclass looks for its module
    exec(compile(_MODULE, module.__file__, "exec"), module.__dict__)
    return module


def call(span: int, at_ns: int, file: str, function: str = "f", caller: str = "c") -> Call:
    return Call(span, INBOUND, at_ns, caller, file, function)


def test_files_of_most_requests_count_in_the_order_of_their_first_calls():
    calls = [call(span, 100 * span + at, file) for span in (2, 3, 4) for at, file in ((0, "b"), (5, "a"), (9, "b"))]
    found = crossing([*calls, call(3, 302, "seldom")], INBOUND)
    assert (found.count, found.files, found.in_some) == (2, ("b", "a"), ("seldom",))
    assert crossing(calls, OUTBOUND).files == ()


def test_a_call_that_is_also_made_while_idle_is_background():
    idle = call(IDLE, 0, "loop"), call(IDLE, 1, "shared")
    requests = call(2, 10, "loop"), call(2, 11, "shared"), call(2, 12, "shared", caller="request")
    assert crossing([*idle, *requests], INBOUND).files == ("shared",)


def test_a_trace_divides_a_request_at_the_scheduler_and_at_the_runners_result(tmp_path, monkeypatch):
    switch, tracer = Switch(tmp_path / "switch"), Tracer(tmp_path, "/code")
    engine = load(monkeypatch, "replicas/engine/scheduler.py")
    runner = load(monkeypatch, "replicas/model/runner.py")
    other = load(monkeypatch, "testkit/runner.py")
    parts = []
    sys.setprofile(tracer)
    try:
        engine.helper()  # the switch is off
        switch.begin(2)
        for act in (runner.Step().collect, other.helper, engine.Scheduler().add, runner.Step().collect, runner.helper):
            act()
            parts.append(switch.part)
        switch.end()
        engine.helper()
    finally:
        sys.setprofile(None)
    assert parts == [INBOUND, INBOUND, COMPUTING, OUTBOUND, OUTBOUND]
    calls = [Call(**json.loads(line)) for line in next(tmp_path.glob("*.calls")).read_text().splitlines()]
    assert [(each.part, each.file.rpartition("/")[2], each.function.rpartition(".")[2]) for each in calls] == [
        (INBOUND, "runner.py", "collect"),
        (INBOUND, "runner.py", "helper"),
        (INBOUND, "scheduler.py", "add"),
        (COMPUTING, "scheduler.py", "__init__"),
        (COMPUTING, "runner.py", "collect"),
        (COMPUTING, "runner.py", "helper"),
        (OUTBOUND, "runner.py", "helper"),
    ]
