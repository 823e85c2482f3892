"""Steps on a device that runs late, with Triton's kernels of sampling, kept weights and experts."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from replicas.model import build
from replicas.model.layers import triton_experts, triton_panels
from replicas.model.layers.experts import FusedExperts, replace_experts
from replicas.model.layers.panels import PanelLinear, Panels
from replicas.model.layers.triton_experts import expert_linear
from replicas.model.layers.triton_panels import TritonPanels
from replicas.model.sampling import logprobs, sampler, triton_draw, triton_logprobs, triton_penalties
from replicas.model.sampling.fixed_arrays import FixedSampling
from replicas.model.sampling.token_counts import TokenCounts
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.late_kernels import run_late
from testkit.model.quantized_checkpoints import quantize_checkpoint
from testkit.model.recorded_gpu import RecordedGpu
from tests.model.cuda_graphs import test_order
from tests.model.cuda_graphs.test_order import check_few_steps, gpu, load  # noqa: F401
from tests.model.interpreted.test_panels import CPU, METHODS, load_in_panels

pytestmark = pytest.mark.rotated

SAMPLING_KERNELS = {
    "count_kernel", "bracket_kernel", "gather_kernel", "settle_kernel", "draw_kernel", "penalize_kernel", "mask_kernel",
    "mass_kernel", "full_kernel", "peak_kernel", "score_kernel",
}  # fmt: skip


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests end soon: the interpreter takes a second for a step of products."""
    monkeypatch.setattr(test_order, "PARAMS", tuple(replace(params, max_tokens=5) for params in test_order.PARAMS))


@pytest.fixture
def late_sampling(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Let the recorded GPU sample with Triton's kernels."""
    run_late(
        monkeypatch, triton_draw, count_kernel=("counts",), bracket_kernel=("brackets",),
        gather_kernel=("sums", "listed_values", "listed_ids"), settle_kernel=("tokens",), draw_kernel=("tokens",),
        mass_kernel=("masses",), full_kernel=("tokens",), peak_kernel=("peaks",),
    )  # fmt: skip
    run_late(monkeypatch, triton_logprobs, score_kernel=("best", "log_sums"))
    run_late(monkeypatch, triton_penalties, penalize_kernel=("logits",), mask_kernel=("logits",))
    for module in (build, sampler):
        monkeypatch.setattr(module, "has_draw_kernel", lambda device: device.type == "cuda")
    monkeypatch.setattr(logprobs, "has_score_kernel", lambda device: device.type == "cuda")
    monkeypatch.setattr(build, "token_counts", lambda *sizes: TokenCounts(*sizes[:3], triton_penalties.penalize))


@pytest.mark.usefixtures("late_sampling")
def test_sampling_is_in_order(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    drawn = [params for params in test_order.PARAMS if params.top_p < 1.0 or params.repetition_penalty != 1.0]
    constrained = [
        replace(params, temperature=0.0, logprobs=2) for params in test_order.PARAMS if params.grammar is not None
    ]
    monkeypatch.setattr(test_order, "PARAMS", tuple(replace(params, max_tokens=4) for params in (*drawn, *constrained)))
    runner = check_few_steps(gpu, monkeypatch, load("llama"), load("llama"), num_steps=5)
    assert gpu.names >= SAMPLING_KERNELS
    assert runner._graphs is not None
    shapes = {id(captured.graph): shape for shape, captured in runner._graphs._sampling_graphs.items()}
    replayed = {shapes[id(graph)] for _, graph in gpu.replays if id(graph) in shapes}
    assert {shape.is_truncated for shape in replayed} == {shape.has_changes for shape in replayed} == {True, False}


@pytest.mark.usefixtures("late_sampling")
def test_steps_are_captured_where_sampling_is_not(
    gpu: RecordedGpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(test_order, "PARAMS", (test_order.PARAMS[0],))

    def fail(*_: object) -> None:
        raise RuntimeError("this device cannot capture a choice")

    monkeypatch.setattr(FixedSampling, "choose", fail)
    runner = check_few_steps(gpu, monkeypatch, load("llama"), load("llama"), num_steps=3)
    assert runner._graphs is not None and runner._graphs.sampling_padding() is None
    assert runner._graphs.num_graphs == len(runner._graphs.shapes)
    assert "this device cannot capture a choice" in caplog.text


@pytest.mark.deep
@pytest.mark.usefixtures("few_tokens")
def test_experts_are_in_order(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    loaded, plain = load("qwen3_moe"), load("qwen3_moe")
    assert replace_experts(loaded.model, expert_linear) is None
    run_late(monkeypatch, triton_experts, expert_linear_kernel=("output",))
    check_few_steps(gpu, monkeypatch, loaded, plain, num_steps=4)
    assert "expert_linear_kernel" in gpu.names


@pytest.mark.deep
@pytest.mark.usefixtures("few_tokens")
def test_weights_in_panels_are_in_order(
    gpu: RecordedGpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Products of more than four rows use the scratch that all layers share."""
    path = quantize_checkpoint(cached_checkpoint("qwen3_moe"), tmp_path, METHODS["AWQ"])
    products = TritonPanels(CPU)
    loaded, plain = load_in_panels(path, products), load_in_panels(path, TritonPanels(CPU))
    for module in loaded.model.modules():
        if isinstance(module, PanelLinear):
            module.panels = on_device(gpu, module.panels)
        elif isinstance(module, FusedExperts):
            module.kept = {name: on_device(gpu, panels) for name, panels in module.kept.items()}
    products._scratch, products._no_numbers = gpu.to_device(products._scratch), gpu.to_device(products._no_numbers)
    monkeypatch.setattr(triton_panels, "most_rows", lambda *_: 4)
    run_late(
        monkeypatch, triton_panels, panel_linear_kernel=("output",), panel_expert_kernel=("output",),
        widen_kernel=("output",), add_parts_kernel=("output",),
    )  # fmt: skip
    check_few_steps(gpu, monkeypatch, loaded, plain, num_steps=4)
    assert gpu.names >= {"panel_linear_kernel", "panel_expert_kernel", "widen_kernel"}


def on_device(gpu: RecordedGpu, panels: Panels) -> Panels:  # noqa: F811
    table = None if panels.table is None else gpu.to_device(panels.table)
    return replace(panels, table=table, **{name: gpu.to_device(part) for name, part in panels.parameters()})
