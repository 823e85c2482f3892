"""transformers' `generate()`: left-padded batches in order of arrival, each run to its longest request.

`--static 1` runs one request at a time. Padding and finished rows are wasted work that is part of the method.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

from bench.peers import driver
from bench.peers.engine import Events, PeerEngine, PeerRequest


class _StepClock(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that never stops and records the end of each step."""

    def __init__(self) -> None:
        self.step_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Record the time; called after each step."""
        self.step_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class StaticGenerate(PeerEngine):
    """Plain model with its own cache and SDPA attention, over static batches."""

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._model = model
        self._model.generation_config.eos_token_id = None
        self._batch_size = batch_size

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Run one batch after another, of `--static` requests each.

        A higher `concurrency` puts all requests into one batch, unless `--static` is 1.
        """
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
        ids, mask = left_padded([request.prompt for request in batch])
        num_steps = max(request.num_output_tokens for request in batch)
        clock = _StepClock()
        output = self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=num_steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        assert output.shape == (len(ids), ids.shape[1] + num_steps) and len(clock.step_s) == num_steps
        return clock.step_s


def left_padded(prompts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, each [num_prompts, longest] int64."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)


def load_plain(path: str, dtype: torch.dtype, num_threads: int) -> PreTrainedModel:
    """Load a model without Headway's layers and attention."""
    torch.set_num_threads(num_threads)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def load(arguments: argparse.Namespace) -> PreTrainedModel:
    """Load the model that a runner's arguments name."""
    return load_plain(arguments.model, getattr(torch, driver.DTYPES[arguments.dtype]), arguments.threads)


def make(arguments: argparse.Namespace) -> StaticGenerate:
    """Load the model."""
    return StaticGenerate(load(arguments), arguments.static)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--static", type=int, default=16, help="requests in a batch")


if __name__ == "__main__":
    driver.main(make, "transformers generate()", _add_arguments)
