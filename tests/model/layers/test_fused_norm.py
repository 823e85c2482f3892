"""Norms are replaced where the fused one computes the same, whatever they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from replicas.model.layers.fused_norm import FusedNorm, replace_norms
from replicas.model.layers.interface import TorchLayerOps
from testkit.model.tiny_checkpoints import tiny_config


class PlainRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = 1e-6
        self.offset = offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return hidden * scale * (self.weight + self.offset)


def test_only_what_computes_the_same_is_replaced() -> None:
    model = nn.ModuleDict({"plain": PlainRMSNorm(), "shifted": PlainRMSNorm(offset=1.0), "other": nn.LayerNorm(16)})
    plain = model["plain"]
    replace_norms(model, TorchLayerOps())
    assert isinstance(model["plain"], FusedNorm)
    assert not isinstance(model["shifted"], FusedNorm) and not isinstance(model["other"], FusedNorm)
    hidden = torch.randn(2, 5, 3, 16)[:, :, 1:]
    torch.testing.assert_close(model["plain"](hidden), plain(hidden))


@pytest.mark.parametrize(("architecture", "num_replaced"), [("mixtral", 7), ("gemma2-window", 0), ("qwen3_moe", 13)])
def test_norms_of_models(architecture: str, num_replaced: int) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(architecture)).eval()
    replace_norms(model, TorchLayerOps())
    assert sum(isinstance(module, FusedNorm) for module in model.modules()) == num_replaced
