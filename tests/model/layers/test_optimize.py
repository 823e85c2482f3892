"""Norms are replaced where the fused one computes the same; layers that are compiled compute what they did before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from replicas.model.attention.probe import probe_attention
from replicas.model.layers.ops import TorchLayerOps
from replicas.model.layers.optimize import FusedNorm, compile_layers, replace_norms
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    check_equals_generate,
    load_unoptimized,
    random_model,
    random_prompts,
)
from testkit.model.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.rotated


class PlainRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = 1e-6
        self.offset = offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return hidden * scale * (self.weight + self.offset)


def test_only_equivalent_layers_are_replaced() -> None:
    model = nn.ModuleDict({
        "plain": PlainRMSNorm(),
        "centred": PlainRMSNorm(offset=1.0),
        "shifted": PlainRMSNorm(offset=0.5),
        "other": nn.LayerNorm(16),
    })  # fmt: skip
    originals = dict(model)
    replace_norms(model, TorchLayerOps())
    assert [name for name, norm in model.items() if isinstance(norm, FusedNorm)] == ["plain", "centred"]
    hidden = torch.randn(2, 5, 3, 16)[:, :, 1:]
    for name, original in originals.items():
        torch.testing.assert_close(model[name](hidden), original(hidden))


@pytest.mark.parametrize(("architecture", "num_replaced"), [("mixtral", 7), ("gemma2-window", 13), ("qwen3_moe", 13)])
def test_norms_of_models(architecture: str, num_replaced: int) -> None:
    model = random_model(architecture)
    replace_norms(model, TorchLayerOps())
    assert sum(isinstance(module, FusedNorm) for module in model.modules()) == num_replaced


# The compiler's code generator takes a minute. The test runs the traced graphs without it.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("architecture", "num_kinds"), [("gemma2-window", 2), ("phi3", 1)])
def test_compiled_layers_equal_generate_with_two_graphs_each(tmp_path: Path, architecture: str, num_kinds: int) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    loaded = load_unoptimized(path)
    assert compile_layers(loaded.model, loaded.port, "aot_eager")
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=20))
    check_equals_generate(engine, path, random_prompts((5, 30, 70)), max_tokens=8)
    assert counters["stats"]["unique_graphs"] == 2 * num_kinds
    assert not counters["graph_break"]


def wrong(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
    """Compile to code that computes something else."""
    return lambda *inputs: tuple(one * 1.5 if isinstance(one, torch.Tensor) else one for one in graph(*inputs))


def broken(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
    raise OSError("no C compiler")


@pytest.mark.parametrize(("backend", "fault"), [(wrong, "differs from plain torch"), (broken, "no C compiler")])
def test_a_compiler_that_proves_wrong_or_fails_is_not_used(
    tmp_path: Path, backend: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    loaded = load_unoptimized(write_checkpoint(tmp_path, "phi3", with_tokenizer=False))
    assert not compile_layers(loaded.model, loaded.port, backend)
    assert fault in caplog.text
    assert probe_attention(loaded.model, loaded.port) == loaded.layers
