"""The checks and measurements of `make gpu-check`, as tests; and that the command never passes without a device."""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bench import gpu_check
from bench.engine.models import random_model
from bench.gpu import device_time, first_answer, host_gap, mixed_trace
from bench.gpu import groups as gpu_groups
from bench.gpu.groups import groups
from bench.gpu.items import (
    Group,
    Item,
    Line,
    Outcome,
    OutcomeFile,
    Prediction,
    Target,
    compared,
    figures_of,
    read_predictions,
)
from bench.gpu.model_checks import (
    AHEAD_ARCHITECTURES,
    ARCHITECTURES,
    check_ahead,
    check_architecture,
    check_sampler,
    check_threads,
)
from replicas.engine.config import EngineLimits
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.options import RunnerOptions
from replicas.protocol import SamplingParams

SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
    max_position_embeddings=256,
)  # fmt: skip
LONGER = LlamaConfig(**{**SMALL.to_dict(), "vocab_size": 8192, "max_position_embeddings": 2048})
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
    assert check_sampler(device).passed


def test_figures_are_shown_beside_those_of_a_former_run() -> None:
    def run(milliseconds: float) -> list[Line]:
        figures = {"steps": [{"step": "decode 1", "ms": milliseconds, "fits": True}], "blocks": [3, 4]}
        return [Line("times", "steps", None, "", figures=figures)]

    assert list(compared(run(3.0), run(2.0))) == [
        "times/steps steps decode 1 ms: 3, then 2 (1.50)",
        "times/steps blocks 0: 3, then 3 (1.00)",
        "times/steps blocks 1: 4, then 4 (1.00)",
    ]
    assert list(compared(run(3.0), [])) == []
    predicted = [Prediction("times/steps steps decode 1 ms", 2.5, 4.0, "bytes / bandwidth")]
    assert list(compared(run(3.0), [], predicted)) == [
        "times/steps steps decode 1 ms: 3, predicted 2.5 (1.20), bar 4",
    ]


@dataclass(frozen=True)
class AnyModel:
    """Stand-in for a model that no stand-in of a measurement looks at."""

    is_batch_invariant: bool = False


@dataclass(frozen=True)
class AnyRunner:
    """Stand-in for a runner of which measurements look at the block tables alone."""

    windows: tuple[int | None, ...] = (512, None)


def test_every_prediction_names_a_figure_that_the_check_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurements of a GPU, with stand-ins for what is timed."""
    kernel_times = pytest.importorskip("bench.gpu.kernel_times")

    def decode(runner: object, size: int, context: int, params: object) -> device_time.StepTime:
        return device_time.StepTime(f"decode {size} x {context}", size, 1.0, 1.0, 1.0)

    def prefill(runner: object, num_tokens: int) -> device_time.StepTime:
        return device_time.StepTime(f"prefill {num_tokens}", num_tokens, 1.0, 1.0, 1.0)

    for module in (gpu_groups, kernel_times):
        for name, stand_in in (("random_model", lambda *_: AnyModel()), ("build_runner", lambda *_: AnyRunner()),
                               ("measure_decode", decode), ("release", lambda: None)):  # fmt: skip
            monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(gpu_groups, "warm_up", lambda *_: None)
    monkeypatch.setattr(gpu_groups, "measure_prefill", prefill)
    monkeypatch.setattr(kernel_times, "_prefill", lambda *_: kernel_times.PrefillTime(64, 1, 1.0, 1.0, 1.0))
    monkeypatch.setattr(kernel_times, "copy_bandwidth", lambda _: 4e12)
    monkeypatch.setattr(
        kernel_times, "_compare",
        lambda shape, kernels, _, size, *__: kernel_times.DecodeTime(shape, kernels, size, 1024, 1.0, 1.0, 1.0, 1.0),
    )  # fmt: skip
    monkeypatch.setattr(
        kernel_times, "measure_sampling",
        lambda _, kinds, rows, __: {kind: {str(number): 1.0 for number in rows} for kind in kinds},
    )  # fmt: skip
    sizes = (*(f"decode {size}" for size in kernel_times.BATCH_SIZES), "prompt 2048")
    monkeypatch.setattr(
        kernel_times, "measure_recurrence", lambda _, layers: {name: dict.fromkeys(sizes, 1.0) for name in layers}
    )
    measured = {("steps", "steps"), ("steps", "windows"), ("steps", "prefill"), ("steps", "sampling"),
                ("steps", "batch-invariant steps"), ("steps", "recurrence"), ("steps", "caches in 8 bits"),
                ("decodes", "decodes"), ("panels", "products"), ("start", "first answer")}  # fmt: skip
    monkeypatch.setattr(
        first_answer, "measure_first_answers", lambda *_, **__: {name: {"all": 1.0} for name in ("empty", "filled")}
    )
    panel_times = pytest.importorskip("bench.gpu.panel_times")
    monkeypatch.setattr(panel_times, "measure_panels", lambda *_, **__: [
        panel_times.PanelTime(form, f"{number} rows", 1.0, 1.0)
        for form in panel_times.FORMS for number in panel_times.ROWS
    ])  # fmt: skip
    monkeypatch.setattr(panel_times, "measure_experts", lambda *_, **__: [
        panel_times.PanelTime(f"experts of {name}", f"{number} tokens", 1.0, 1.0)
        for name in panel_times.EXPERTS for number in panel_times.TOKENS
    ])  # fmt: skip
    monkeypatch.setattr(panel_times, "measure_float8", lambda *_, **__: [
        panel_times.PanelTime("fp8_w8a8", f"{number} rows", 1.0, 1.0) for number in panel_times.ROWS
    ])  # fmt: skip
    lines = [
        Line(group.name, item.name, None, "", figures=json.loads(json.dumps(item.run().figures)))
        for group in groups(Target("cuda")) for item in group.items if (group.name, item.name) in measured
    ]  # fmt: skip
    predictions = read_predictions(gpu_check.PREDICTIONS)
    assert len(predictions) >= 10 and all(one.formula and one.value > 0 for one in predictions)
    assert {one.figure for one in predictions} <= figures_of(lines).keys()


def faulty(target: Target) -> tuple[Group, ...]:
    """Return groups of which some items raise, hang or kill their process."""

    def fine() -> Outcome:
        return Outcome(True, f"on {target.device}", {"number": 7})

    def raising() -> Outcome:
        raise ValueError("a wrong number")

    def hanging() -> Outcome:
        threading.Event().wait()
        raise AssertionError

    def killing() -> Outcome:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def spoiling() -> Outcome:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    first = (
        Item("before", fine), Item("spoils", spoiling), Item("raises", raising, "try another number"),
        Item("hangs", hanging, limit_s=1.0), Item("kills", killing), Item("after", fine),
    )  # fmt: skip
    return Group("checks", "faulty", first), Group("checks", "next", (Item("measures", lambda: Outcome(None, "1 ms")),))


@pytest.mark.deep
def test_an_item_that_hangs_or_kills_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_START_LIMIT_S", 30.0)
    place = f"{__name__}:faulty"
    output = tmp_path / "figures.json"
    assert gpu_check.main(["--device", "cpu", "--groups", place, "--output", str(output), "--budget-s", "100"]) == 1
    lines = {line.item: line for line in OutcomeFile(output.with_suffix(".jsonl")).lines()}
    passed = {name: line.passed for name, line in lines.items()}
    failed = dict.fromkeys(("spoils", "raises", "hangs", "kills"), False)
    assert passed == {"before": True, **failed, "after": True, "measures": None}
    assert lines["raises"].detail == "ValueError: a wrong number" and lines["raises"].advice == "try another number"
    assert "killed" in lines["hangs"].detail and "status -9" in lines["kills"].detail
    assert lines["after"].figures == {"number": 7}
    assert [item["item"] for item in json.loads(output.read_text())["items"]] == list(lines)


@pytest.mark.deep
def test_every_item_runs_in_its_smallest_form(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--tiny", "--output", str(output), "--budget-s", "500"]
    assert gpu_check.main(arguments) == 0
    lines = OutcomeFile(output.with_suffix(".jsonl")).lines()
    names = [(group.name, item.name) for group in groups(Target("cpu", is_tiny=True)) for item in group.items]
    assert [(line.group, line.item) for line in lines] == names
    assert not [line for line in lines if "not run" in line.detail]


def test_items_beyond_the_budget_are_named(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--groups", f"{__name__}:faulty", "--output", str(output), "--budget-s", "1"]
    assert gpu_check.main(arguments) == 0
    details = {line.detail for line in OutcomeFile(output.with_suffix(".jsonl")).lines()}
    assert details == {"not run: the budget of 1 s was spent"}


def test_a_runner_may_run_in_another_thread_than_it_was_built_in() -> None:
    assert check_threads("cpu").passed


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_equals_generate_on_the_gpu(architecture: str) -> None:
    assert check_architecture(architecture, "cuda", attention="triton").passed


@pytest.mark.parametrize("is_tied", [True, False])
def test_decodes_read_all_weights_except_untied_embeddings(is_tied: bool) -> None:
    pytest.importorskip("triton")
    from bench.gpu.kernel_times import read_bytes

    loaded = random_model(LlamaConfig(**{**SMALL.to_dict(), "tie_word_embeddings": is_tied}), torch.float32, "cpu")
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert read_bytes(loaded) == 4 * (2 * layer + 64 + 512 * 64)


@pytest.mark.gpu
@needs_gpu
def test_kernels_equal_attention_by_definition_on_the_gpu() -> None:
    checks = [group for group in groups(Target("cuda")) if group.name == "kernels"]
    assert not [item.name for group in checks for item in group.items if not item.run().passed]


def test_architecture_check_runs_on_the_cpu() -> None:
    assert check_architecture("gpt_oss-window", "cpu").detail == "0 first differences"


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_time, "NUM_ITERATIONS", 2)
    limits, options = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64), RunnerOptions(kv_cache_bytes=2**22)
    runner = build_runner(random_model(SMALL, torch.bfloat16, device), limits, options)
    warm_up(runner, limits)
    params = SamplingParams(max_tokens=8, top_p=0.9)
    assert device_time.measure_decode(runner, 4, 100, params).min_ms > 0
    assert device_time.measure_prefill(runner, 64).tokens_per_s > 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("architecture", AHEAD_ARCHITECTURES)
def test_steps_ahead_give_the_tokens_of_plain_steps(architecture: str) -> None:
    assert check_ahead(architecture, "cuda").passed


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_gaps_are_measured(enforce_eager: bool) -> None:
    limits = EngineLimits(max_num_seqs=host_gap.MANY_SEQS)
    options = RunnerOptions(gpu_memory_utilization=0.3, enforce_eager=enforce_eager)
    runner = build_runner(random_model(LONGER, torch.bfloat16, "cuda"), limits, options)
    warm_up(runner, limits)
    gap = host_gap.measure(runner, 8, is_async=True)
    assert gap.has_graphs is not enforce_eager
    assert gap.period_p50_ms > 0 and 0 < gap.busy_share <= 1


@pytest.mark.gpu
@needs_gpu
def test_every_engine_runs_the_trace() -> None:
    outcomes = mixed_trace.measure_trace(
        lambda: random_model(LONGER, torch.bfloat16, "cuda"),
        lambda: mixed_trace.plain_model(LONGER, torch.bfloat16, "cuda"),
    )
    assert [outcome.fault for outcome in outcomes] == [None] * len(outcomes)
