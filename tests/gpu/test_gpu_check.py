"""The same checks as `make gpu-check`, as tests; and that the command never passes without a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bench import gpu_check
from replicas.engine.config import EngineLimits
from replicas.model.build import build_runner, warm_up
from replicas.model.options import RunnerOptions
from replicas.protocol import SamplingParams

SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
    max_position_embeddings=256,
)  # fmt: skip
FLOAT32 = torch.float32
HAS_CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.skipif(HAS_CUDA, reason="tests what happens without a CUDA device")
def test_command_fails_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--output", str(tmp_path / "figures.json")]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.parametrize("device", DEVICES)
def test_sampler_draws_as_on_the_cpu(device: str) -> None:
    assert gpu_check.check_sampler(device).passed


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("architecture", gpu_check.ARCHITECTURES)
def test_architecture_equals_generate_on_the_gpu(architecture: str) -> None:
    assert gpu_check.check_architecture(architecture, "cuda", attention="triton").passed


@pytest.mark.parametrize("is_tied", [True, False])
def test_decodes_read_all_weights_but_embeddings_that_are_not_the_head(is_tied: bool) -> None:
    pytest.importorskip("triton")
    from bench.gpu.kernel_times import read_bytes

    loaded = gpu_check.random_model(LlamaConfig(**{**SMALL.to_dict(), "tie_word_embeddings": is_tied}), FLOAT32, "cpu")
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert read_bytes(loaded) == 4 * (2 * layer + 64 + 512 * 64)


@pytest.mark.gpu
@needs_gpu
def test_kernels_equal_attention_by_definition_on_the_gpu() -> None:
    from bench.gpu.kernel_checks import kernel_checks

    checks = [check("cuda") for check in kernel_checks()]
    assert not [check for check in checks if not check.passed]


def test_architecture_check_runs_on_the_cpu() -> None:
    assert gpu_check.check_architecture("gpt_oss-window", "cpu").detail == "0 first differences"


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "NUM_ITERATIONS", 2)
    limits, options = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64), RunnerOptions(kv_cache_bytes=2**22)
    runner = build_runner(gpu_check.random_model(SMALL, torch.bfloat16, device), limits, options)
    warm_up(runner, limits)
    params = SamplingParams(max_tokens=8, top_p=0.9)
    assert gpu_check.measure_decode(runner, 4, 100, params).min_ms > 0
    assert gpu_check.measure_prefill(runner, 64).tokens_per_s > 0
