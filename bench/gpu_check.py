"""Correctness of the model on this CUDA device, and its speed: `make gpu-check`.

Needs only torch, triton and transformers: no network, no test framework, no Ray. Each group of items runs in a process
of its own. `--output FILE.json` is written after each group; beside it `FILE.jsonl` gets a line when an item ends. An
item that fails runs once more with blocking launches. When the budget of time is spent, the items that are left are
named. `--device cpu --tiny` runs all items that a processor can run, in their smallest form.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.gpu.child import SPOILT
from bench.gpu.items import Group, Item, Line, OutcomeFile, Target, compared, group_list, read_predictions
from bench.record import RESULTS, write

PREDICTIONS = RESULTS / "predictions.json"
GROUPS = "bench.gpu.groups:groups"
_START_LIMIT_S = 90.0
"""Most seconds that a process may take until its first item begins: it imports torch and makes a context."""
_LEAST_BUDGET_S = 5.0
_POLL_S = 0.1
_ERROR_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that a run may take."""

    seconds: float
    started_s: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.started_s)


class GroupProcess:
    """Run of a group in processes of its own: an item that hangs or kills its process is noted, the others go on."""

    def __init__(self, group: Group, target: Target, groups: str, outcomes: OutcomeFile) -> None:
        self._group = group
        self._target = target
        self._groups = groups
        self._outcomes = outcomes

    def run(self, budget: Budget) -> None:
        """Run all items; those that fail on a GPU run again with blocking launches."""
        self._run_all(list(self._group.items), budget, is_blocking=False)
        failed = [item for item in self._group.items if self._has_failed(item)]
        if failed and self._target.device == "cuda":
            self._run_all(failed, budget, is_blocking=True)

    def _has_failed(self, item: Item) -> bool:
        return any(line.item == item.name and line.passed is False for line in self._lines())

    def _lines(self) -> list[Line]:
        return [line for line in self._outcomes.lines() if line.group == self._group.name]

    def _run_all(self, items: list[Item], budget: Budget, is_blocking: bool) -> None:
        pending = items
        while pending:
            if budget.left_s < _LEAST_BUDGET_S:
                detail = f"not run: the budget of {budget.seconds:g} s was spent"
                for item in pending:
                    self._outcomes.append(Line(self._group.name, item.name, None, detail, is_blocking=is_blocking))
                return
            fault = self._run_process(pending, budget, is_blocking)
            ended = {line.item for line in self._lines() if line.is_blocking == is_blocking}
            pending = [item for item in pending if item.name not in ended]
            if pending and fault is not None:
                culprit = pending[0]
                self._outcomes.append(
                    Line(self._group.name, culprit.name, False, fault, 0.0, is_blocking, culprit.advice)
                )
                pending = pending[1:]

    def _run_process(self, items: Sequence[Item], budget: Budget, is_blocking: bool) -> str | None:
        """Run items in one process; return the reason why it did not come to its end, if that is an item's fault."""
        command = [sys.executable, "-m", "bench.gpu.child", "--groups", self._groups, "--group", self._group.name]
        command += ["--items", "|".join(item.name for item in items), "--device", self._target.device]
        command += ["--output", str(self._outcomes.path)]
        command += ["--tiny"] * self._target.is_tiny + ["--blocking"] * is_blocking
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command, stdout=sys.stderr, stderr=errors, env=self._environment(is_blocking), start_new_session=True
            )
            is_stopped = False
            try:
                fault = self._watch(process, items, budget)
                is_stopped = process.poll() is None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if fault is None and not is_stopped and process.returncode not in (0, SPOILT):
                errors.seek(0)
                end = errors.read().decode(errors="replace")[-_ERROR_CHARACTERS:]
                fault = f"the process ended with status {process.returncode}: {end}"
        return fault

    def _environment(self, is_blocking: bool) -> dict[str, str]:
        environment = dict(os.environ)
        if self._target.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        if is_blocking:
            environment["CUDA_LAUNCH_BLOCKING"] = "1"
        return environment

    def _watch(self, process: subprocess.Popen[bytes], items: Sequence[Item], budget: Budget) -> str | None:
        """Wait for the process or the budget's end; return the fault of an item that takes too long."""
        num_ended, changed_s, shown = 0, time.monotonic(), len(self._outcomes.lines())
        while True:
            is_running = process.poll() is None
            lines = self._outcomes.lines()
            for line in lines[shown:]:
                print(line.text, flush=True)
            if len(lines) > shown:
                num_ended, changed_s, shown = num_ended + len(lines) - shown, time.monotonic(), len(lines)
            if not is_running or budget.left_s <= 0:
                return None
            limit_s = items[min(num_ended, len(items) - 1)].limit_s + (0 if num_ended else _START_LIMIT_S)
            if time.monotonic() - changed_s > limit_s:
                return f"it has not ended for {limit_s:g} s, and was killed"
            time.sleep(_POLL_S)


def main(arguments: list[str] | None = None) -> int:
    """Run the groups; return non-zero if a check failed or there is no GPU."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 1
    output = options.output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    target = Target(options.device, options.tiny, output.parent)
    groups = group_list(options.groups)(target)
    parts = options.parts.split(",") if options.parts else list(dict.fromkeys(group.part for group in groups))
    if unknown := set(parts) - {group.part for group in groups} - {group.name for group in groups}:
        parser.error(f"no such parts or groups: {', '.join(sorted(unknown))}")
    outcomes = OutcomeFile(output.with_suffix(".jsonl"))
    outcomes.path.unlink(missing_ok=True)
    budget = Budget(options.budget_s, time.monotonic())
    for group in groups:
        if group.part in parts or group.name in parts:
            GroupProcess(group, target, options.groups, outcomes).run(budget)
            _write(output, options.device, outcomes)
    if options.compare is not None:
        former, predictions = OutcomeFile(options.compare).lines(), read_predictions(PREDICTIONS)
        print("\n".join(compared(outcomes.lines(), former, predictions)))
    counts = Counter(line.passed for line in outcomes.lines() if not line.is_blocking)
    print(f"{counts[True]} passed, {counts[False]} failed, {counts[None]} others; written to {output}")
    return 1 if counts[False] else 0


def _write(output: Path, device: str, outcomes: OutcomeFile) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    lines = outcomes.lines()
    all_passed = all(line.passed is not False for line in lines)
    write(str(output.with_suffix("")), {"device": name, "all_passed": all_passed, "items": list(map(asdict, lines))})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_check.json")
    parser.add_argument("--parts", default="", help="parts or groups to run, separated by commas; none: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest form of every item")
    parser.add_argument("--budget-s", type=float, default=560.0, help="most seconds of the whole run")
    parser.add_argument("--compare", type=Path, help="FILE.jsonl of a former run to show, with predictions")
    parser.add_argument("--groups", default=GROUPS, help="module:function that returns the groups")
    return parser


if __name__ == "__main__":
    sys.exit(main())
