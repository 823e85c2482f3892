"""Process of one group: `python -m bench.gpu.child --group NAME --output FILE`; writes a line when an item ends."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch
from transformers.utils import logging

from bench.gpu.device_time import release
from bench.gpu.items import Item, Line, Outcome, OutcomeFile, Target, group_list

SPOILT = 3
"""Status of a process that an error of the device has spoilt: the items after it need another process."""
_SPOILING = ("CUDA error", "device-side assert", "illegal memory access")


def main() -> None:
    """Run the items of a group in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", required=True, help="module:function that returns the groups")
    parser.add_argument("--group", required=True)
    parser.add_argument("--items", required=True, help="items to run, separated by |")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--blocking", action="store_true", help="note in the lines that launches wait")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    target = Target(options.device, options.tiny, options.output.parent)
    (group,) = (each for each in group_list(options.groups)(target) if each.name == options.group)
    wanted, outcomes = options.items.split("|"), OutcomeFile(options.output)
    for item in group.items:
        if item.name in wanted:
            line = _line(group.name, item, options.blocking)
            outcomes.append(line)
            if line.passed is False and any(mark in line.detail for mark in _SPOILING):
                sys.exit(SPOILT)
            release()


def _line(group: str, item: Item, is_blocking: bool) -> Line:
    started_s = time.monotonic()
    try:
        outcome = item.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # An error of a kernel arises only now.
    except Exception as error:  # An error in one item must not hide the others.
        outcome = Outcome(False, f"{type(error).__name__}: {error}", {"traceback": traceback.format_exc()})
    seconds = time.monotonic() - started_s
    advice = item.advice if outcome.passed is False else ""
    return Line(
        group, item.name, outcome.passed, outcome.detail, round(seconds, 2), is_blocking, advice, outcome.figures
    )


if __name__ == "__main__":
    main()
