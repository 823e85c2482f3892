"""transformers' `generate()`: left-padded batches in order of arrival, each run to its longest request.

`--static 1` runs one request at a time. Padding and finished rows are wasted work that is part of the method.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from bench.peers import driver
from bench.peers.engine import Events
from bench.peers.workload import PeerRequest


class _StepClock(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that never stops and records the end of each step."""

    def __init__(self) -> None:
        self.step_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Record the time; called after each step."""
        self.step_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class StaticGenerate:
    """The plain model with its own cache and SDPA attention."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(arguments.threads)
        self._batch_size: int = arguments.static
        self._model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, driver.DTYPES[arguments.dtype]), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Run one batch after another, of `--static` requests or, for a higher concurrency, of all requests."""
        is_larger = concurrency > self._batch_size > 1
        batch_size = max(self._batch_size, len(requests)) if is_larger else self._batch_size
        token_s: dict[int, list[float]] = {}
        started_s = time.perf_counter()
        for first in range(0, len(requests), batch_size):
            batch = requests[first : first + batch_size]
            step_s = self._generate(batch)
            token_s |= {request.number: step_s[: request.num_output_tokens] for request in batch}
        return Events(token_s, started_s, time.perf_counter())

    @torch.inference_mode()
    def _generate(self, batch: Sequence[PeerRequest]) -> list[float]:
        """Return the end times of the batch's steps."""
        width = max(len(request.prompt) for request in batch)
        num_steps = max(request.num_output_tokens for request in batch)
        padding = [width - len(request.prompt) for request in batch]
        rows = [[0] * left + list(request.prompt) for left, request in zip(padding, batch, strict=True)]
        mask = [[0] * left + [1] * (width - left) for left in padding]
        clock = _StepClock()
        output = self._model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=num_steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        assert output.shape[1] == width + num_steps and len(clock.step_s) == num_steps
        return clock.step_s

    def pids(self) -> list[int]:
        """Return this process."""
        return [os.getpid()]

    def close(self) -> None:
        """Do nothing: the model lives in this process."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--static", type=int, default=16, help="requests in a batch")


if __name__ == "__main__":
    driver.main(StaticGenerate, "transformers generate()", _add_arguments)
