"""Steps ahead and CUDA graphs on a GPU: the checks and measurements of `make gpu-check`, as tests."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from bench.gpu import host_gap, mixed_trace
from bench.gpu.ahead_checks import ARCHITECTURES, check_ahead
from bench.gpu_check import random_model
from replicas.engine.config import EngineLimits
from replicas.model.build import build_runner, warm_up
from replicas.model.options import RunnerOptions

SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=8192,
    max_position_embeddings=2048,
)  # fmt: skip
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_plain_steps(architecture: str) -> None:
    assert check_ahead(architecture, "cuda").passed


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_gaps_are_measured(enforce_eager: bool) -> None:
    limits = EngineLimits(max_num_seqs=host_gap.MANY_SEQS)
    options = RunnerOptions(gpu_memory_utilization=0.3, enforce_eager=enforce_eager)
    runner = build_runner(random_model(SMALL, torch.bfloat16, "cuda"), limits, options)
    warm_up(runner, limits)
    gap = host_gap.measure(runner, 8, is_async=True)
    assert gap.has_graphs is not enforce_eager
    assert gap.period_p50_ms > 0 and 0 < gap.busy_share <= 1


def test_every_engine_runs_the_trace() -> None:
    outcomes = mixed_trace.measure_trace(
        lambda: random_model(SMALL, torch.bfloat16, "cuda"),
        lambda: mixed_trace.plain_model(SMALL, torch.bfloat16, "cuda"),
    )
    assert [outcome.fault for outcome in outcomes] == [None] * len(outcomes)
