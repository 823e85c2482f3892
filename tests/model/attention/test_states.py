"""Kernels of recurrent state give the numbers of plain torch, and are replaced by it where they prove wrong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.recurrent import RuleCall
from replicas.model.attention.state_cache import StateLayer
from replicas.model.attention.state_cpp import CppStates
from replicas.model.attention.state_select import StateSpec, check_steps, choose_states, state_calls
from replicas.model.attention.state_torch import TorchStates
from replicas.model.layers.gated_delta_net import GatedDeltaNet
from replicas.model.layers.hybrid_decoder import HybridDecoder
from replicas.model.loading.loaded_model import LoadedModel
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.compiled_kernels import with_threads
from testkit.model.engine_runs import Sizes, engine_over, load_compiled, make_runner, random_prompts, tokens

pytestmark = pytest.mark.usefixtures("kernels")

LAYERS = {
    "delta rule": StateLayer(0, 160, 4, 4, 2, 16, 32),
    "three heads to a key": StateLayer(0, 6 * 128 + 2 * 2 * 128, 4, 6, 2, 128, 128),
    "Mamba-2": StateLayer(0, 5 * 80 + 2 * 64, 4, 5, 1, 64, 80),
    "convolution": StateLayer(0, 48, 3),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
PROMPTS = random_prompts((33, 50, 5))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def spec(layers: Sequence[StateLayer], dtype: torch.dtype, has_kernels: bool = True) -> StateSpec:
    return StateSpec(layers, 16, dtype, torch.device("cpu"), has_kernels=has_kernels)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_equal_to_plain_torch(layer: StateLayer, dtype: torch.dtype, num_threads: int) -> None:
    states = spec([layer], dtype)
    assert choose_states(states) is CppStates
    caches, steps = check_steps(states)
    bias = torch.linspace(-1, 1, layer.num_channels).to(dtype)
    with with_threads(num_threads):
        for number, inputs in enumerate(steps):
            contexts = [CppStates(caches[0], inputs), TorchStates(caches[1], inputs)]
            conv, rule = state_calls(layer, inputs, dtype, seed=number)
            ours, others = (context.convolve(replace(conv, bias=bias)).float() for context in contexts)
            torch.testing.assert_close(ours, others, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
            if rule is not None:
                ours, others = (context.advance(rule).float() for context in contexts)
                torch.testing.assert_close(ours, others, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    ours, others = (cache[0].states[1:] for cache in caches)
    torch.testing.assert_close(ours, others, atol=1e-4, rtol=1e-4)
    assert layer.num_heads == 0 or bool(ours.abs().sum() > 0)


def test_unsupported_sizes_and_missing_kernels_use_plain_torch() -> None:
    assert choose_states(spec([StateLayer(0, 160, 4, 4, 2, 16, 24)], torch.float32)) is None
    assert choose_states(spec([LAYERS["delta rule"]], torch.float32, has_kernels=False)) is None


def test_wrong_kernels_are_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = CppStates.advance

    def slightly_wrong(self: CppStates, call: RuleCall) -> Tensor:
        return right(self, call) * 1.01

    monkeypatch.setattr(CppStates, "advance", slightly_wrong)
    assert choose_states(spec(list(LAYERS.values()), torch.float32)) is None
    assert "recurrence of" in caplog.text


def run(loaded: LoadedModel, states: Any = CppStates) -> list[list[int]]:
    sizes = Sizes(max_num_batched_tokens=40)
    runner = make_runner(loaded, sizes, CppAttention)
    runner._states = states
    return tokens(engine_over(runner, loaded, sizes), PROMPTS, GREEDY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ["qwen3_5_text-48", "qwen3_next", "olmo_hybrid"])
def test_mixers_are_replaced_and_also_compute_in_torch(architecture: str) -> None:
    loaded = load_compiled(cached_checkpoint(architecture))
    assert sum(isinstance(module, GatedDeltaNet) for module in loaded.model.modules()) == 3
    assert loaded.port.recurrent.mixers == []
    expected = cached_reference(architecture, PROMPTS, GREEDY.max_tokens)
    assert run(loaded) == run(loaded, TorchStates) == expected


def test_a_wrong_mixer_leaves_the_model_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CppStates, "mix", lambda self, layer, rows, parts: rows[:, : -2 * len(parts.rates)] * 0)
    loaded = load_compiled(cached_checkpoint("qwen3_5_text-16"))
    assert "layers of the gated delta rule are slow" in caplog.text
    assert not any(isinstance(module, (GatedDeltaNet, HybridDecoder)) for module in loaded.model.modules())
    assert run(loaded) == cached_reference("qwen3_5_text-16", PROMPTS, GREEDY.max_tokens)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_one_call_for_all_layers_gives_the_tokens_of_its_modules(quantization: Any) -> None:
    loaded = load_compiled(cached_checkpoint("qwen3_5_text-16"), quantization=quantization)
    decoder: Any = loaded.model.model
    assert isinstance(decoder, HybridDecoder) and decoder._stack is not None
    whole = run(loaded)
    decoder._stack = None
    assert run(loaded) == whole
