"""No operation of a decode waits for the device, so that it can be captured; those that do are listed by name.

A meta tensor has no values: an operation that needs one on the host fails, as it would wait on a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from replicas.model.attention.interface import ATTENTION_NAME, AttentionCall, AttentionPort, register_attention
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.probe import probe_shapes
from replicas.model.attention.recurrent import ConvCall, RuleCall
from replicas.model.attention.state_cache import StateCache
from replicas.model.cuda_graphs.graphs import GraphRunner
from replicas.model.cuda_graphs.padding import StepShape
from replicas.model.layers import experts
from replicas.model.layers.experts import ExpertLayer, Routing, replace_experts
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import remove_waits
from replicas.model.pooling.tap import HiddenTap
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import load
from testkit.model.tiny_checkpoints import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, tiny_config

pytestmark = pytest.mark.rotated

EXPERTS = {
    "mixtral", "minimax_m2", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss-window", "deepseek_v2", "deepseek_v3",
    "gemma4_text-experts",
}  # fmt: skip
"""Architectures with experts. Transformers' own need the grouped matrix product, which waits except in bfloat16 on
compute capability 9 and 10; elsewhere a kernel takes its place."""
WAITING = {
    "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "lift_fresh", "bincount",
    "unique_dim", "unique_consecutive", "_unique2", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor",
}  # fmt: skip
META = torch.device("meta")
WITHOUT_GRAPHS = {"gemma3n_text-shared"}
"""Architectures whose layers take a number of the host to the device in each pass (docs/limits.md)."""
NUM_ROWS = 4


class NoAttention:
    """Attention of the right shape: the kernels have tests of their own."""

    def __init__(self, *_: object) -> None:
        pass

    def attend(self, call: AttentionCall) -> Tensor:
        num_tokens, num_heads, _ = call.query.shape
        return call.value.new_zeros(num_tokens, num_heads, call.value.shape[2])


class NoStates:
    """Recurrent layers of the right shape, as a backend and as its contexts."""

    def __call__(self, *_: object) -> Self:
        return self

    planned = __call__

    def convolve(self, call: ConvCall) -> Tensor:
        return torch.empty(call.inputs.shape, dtype=call.inputs.dtype, device=META)

    def advance(self, call: RuleCall) -> Tensor:
        return call.query.new_empty(call.value.shape)


class Recorder(TorchDispatchMode):
    """Recorder of operations, and of those that take tensors of the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.transfers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        self.calls[f"{func.overloadpacket.__name__}.{func._overloadname}"] += 1
        given, made = (
            {leaf.device for leaf in tree_leaves(some) if isinstance(leaf, Tensor)} for some in (args, result)
        )
        if len(given | made) > 1:
            self.transfers.append(str(func))
        return result

    def waiting(self) -> set[str]:
        return WAITING.intersection(self.calls)


@contextmanager
def recorded() -> Iterator[Recorder]:
    with torch.inference_mode(), Recorder() as recorder:
        yield recorder


def decode(model: PreTrainedModel, loaded: LoadedModel) -> None:
    cache = KVCache(loaded.layers, 2, 16, loaded.dtype, loaded.device)
    has_states = bool(loaded.state_layers)
    if has_states:
        cache.states = StateCache(loaded.state_layers, 2, 16, loaded.dtype, loaded.device)
    decodes = StepShape.decodes(NUM_ROWS, has_states=has_states)
    for shape in (decodes, StepShape.mixed(2 * NUM_ROWS, NUM_ROWS, has_states=has_states)):
        GraphRunner(loaded, cache, NoAttention, (decodes, shape))._compute(shape)


def launch_alone(inputs: Tensor, layer: ExpertLayer, routing: Routing, *, is_first: bool) -> Tensor:
    """Return the output's shape: the kernel itself has tests of its own, and its launch waits for nothing."""
    return inputs.new_empty(len(routing.order), layer.out_size)


def run_on_meta(config: PretrainedConfig, *, has_expert_kernel: bool = False) -> Recorder:
    """Run a decode with transformers' own layers, after a first that may keep constants."""
    dtype = torch.bfloat16
    register_attention()
    with META:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    remove_waits(model.eval())
    if has_expert_kernel:
        assert replace_experts(model, launch_alone) is None
    port = AttentionPort(model)
    if port.recurrent.mixers:
        probe_shapes(model, port)
        port.recurrent.backend = NoStates()
    loaded = LoadedModel("", model, port, HiddenTap(model), (), None, 256, VOCAB_SIZE, frozenset(), dtype, META)
    decode(model, loaded)
    with recorded() as recorder:
        decode(model, loaded)
    return recorder


@pytest.mark.sampled(14)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_decode_waits_for_the_device(architecture: str) -> None:
    recorder = run_on_meta(tiny_config(architecture))
    assert bool(recorder.waiting() or recorder.transfers) == (architecture in WITHOUT_GRAPHS)
    assert (recorder.calls["_grouped_mm"] > 0) == (architecture in EXPERTS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_no_decode_of_a_hybrid_waits_for_the_device(architecture: str) -> None:
    recorder = run_on_meta(tiny_config(architecture))
    assert not recorder.waiting() and not recorder.transfers


@pytest.mark.parametrize("architecture", sorted(EXPERTS))
def test_no_decode_waits_with_the_kernel_of_experts(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "find_fault", lambda *_: None)  # Without values there is nothing to compare.
    recorder = run_on_meta(tiny_config(architecture), has_expert_kernel=True)
    assert not recorder.waiting() and not recorder.transfers
    assert recorder.calls["_grouped_mm"] == 0 and recorder.calls["sort"] > 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "gemma2-window", "cohere"])
def test_no_decode_waits_with_the_layers_that_are_served(architecture: str) -> None:
    loaded = load(cached_checkpoint(architecture))
    decode(loaded.model, loaded)
    with recorded() as recorder:
        decode(loaded.model, loaded)
    assert not recorder.waiting()


@pytest.mark.parametrize(
    ("architecture", "encoding"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}),
    ],
)
def test_position_encodings_that_depend_on_the_length_are_fixed(architecture: str, encoding: dict[str, Any]) -> None:
    config = tiny_config(architecture)
    config.rope_parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 256, **encoding}
    recorder = run_on_meta(config)
    assert not recorder.waiting() and not recorder.transfers


@pytest.mark.parametrize(
    "read",
    [
        lambda some: some.max().item(),
        lambda some: some.tolist(),
        lambda some: some[some > 0],
        lambda some: bool(some[0]),
        lambda some: some.nonzero(),
        lambda some: some.cpu(),
        lambda some: some + torch.ones(4),
    ],
)
def test_the_lint_finds_every_kind_of_wait(read: Any) -> None:
    with recorded() as recorder:
        try:
            read(torch.empty(4, device=META))
        except (RuntimeError, NotImplementedError):
            return
    assert recorder.waiting() or recorder.transfers
