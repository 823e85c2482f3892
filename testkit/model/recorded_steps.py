"""Messages of a runner's steps, recorded with their results, and their replay on another runner."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from replicas.model.batch.transfers import DeviceToHostBuffer
from replicas.model.planner import StepMessage
from replicas.model.runner import RunningStep, TorchModelRunner
from replicas.model.sampling.masks import MaskMessage


@dataclass(slots=True)
class RecordedStep:
    """Pickled messages of a step, and its results."""

    message: bytes
    results: DeviceToHostBuffer
    masks: bytes | None = None
    """None: the step was not sampled."""


def record(runner: TorchModelRunner) -> list[RecordedStep]:
    """Return a list that receives all later steps of `runner`."""
    steps: list[RecordedStep] = []
    run, sample = runner.run, runner.sample

    def record_run(message: StepMessage) -> RunningStep:
        pickled = pickle.dumps(message)
        step = run(message)
        steps.append(RecordedStep(pickled, step.to_host))
        return step

    def record_sample(step: RunningStep, masks: MaskMessage | None = None) -> None:
        steps[-1].masks = pickle.dumps(masks)
        sample(step, masks)

    runner.run, runner.sample = record_run, record_sample  # type: ignore[method-assign]
    return steps


def num_changed_steps(runner: TorchModelRunner, steps: Iterable[RecordedStep]) -> int:
    """Run the messages of `steps` on `runner`, which has run nothing; return the number of steps with other results.

    No step waits for the results of another. Results are equal if all their bits are.
    """
    results = []
    for recorded in steps:
        message = pickle.loads(recorded.message)
        step = runner.run(message)
        if recorded.masks is not None:
            runner.sample(step, pickle.loads(recorded.masks))
        assert pickle.dumps(message) == recorded.message, "the run has changed its message"
        results.append((step.to_host, recorded.results))
    return sum(not _are_equal(one, other) for one, other in results)


def _are_equal(one: DeviceToHostBuffer, other: DeviceToHostBuffer) -> bool:
    for buffer in (one, other):
        buffer.wait()
    return all(torch.equal(first, second) for first, second in zip(one.tensors, other.tensors, strict=True))
