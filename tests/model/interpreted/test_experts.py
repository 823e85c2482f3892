"""Experts in Triton's kernel give what transformers' own give, for any routing."""

from itertools import product

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from replicas.model.layers.experts import ExpertLayer, FusedExperts, Routing, replace_experts
from replicas.model.layers.triton_experts import expert_linear
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import Sizes, build_engine, check_equals_generate, load_unoptimized, random_prompts

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss-window", "deepseek_v2", "deepseek_v3")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


pytestmark = [pytest.mark.usefixtures("bfloat16"), pytest.mark.rotated]


def by_definition(inputs: Tensor, layer: ExpertLayer, index: Tensor) -> Tensor:
    """Return the product of each pair, [num_tokens, top_k, out_size] float64, of rows [num_tokens, in_size]."""
    weights = layer.weights.double()[index]
    weights = weights if layer.is_transposed else weights.transpose(2, 3)
    output = torch.einsum("ti,tkio->tko", inputs.double(), weights)
    return output if layer.biases is None else output + layer.biases.double()[index]


def random_index(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Return different experts of each token; some tokens are alike, and half of the experts have few or none."""
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, num_experts // 2 :] *= 0.3
    scores[::3] = scores[0].clone()
    return scores.topk(top_k).indices


def check(
    num_tokens: int, num_experts: int, top_k: int, sizes: tuple[int, int], dtype: torch.dtype, *, is_transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(num_tokens + 10 * top_k)
    in_size, out_size = sizes
    shape = (num_experts, in_size, out_size) if is_transposed else (num_experts, out_size, in_size)
    weights = torch.randn(shape, generator=generator).to(dtype)
    biases = torch.randn(num_experts, out_size, generator=generator).to(dtype) if is_transposed else None
    layer = ExpertLayer(weights, biases, is_transposed)
    index = random_index(generator, num_tokens, num_experts, top_k)
    inputs = torch.randn(num_tokens, in_size, generator=generator).to(dtype)
    expected = by_definition(inputs, layer, index).flatten(0, 1)
    routing = Routing.of(index, num_experts)
    first = expert_linear(inputs, layer, routing, is_first=True)
    of_pairs = inputs.repeat_interleave(top_k, dim=0)[routing.order]
    second = expert_linear(of_pairs, layer, routing, is_first=False)
    for output, wanted in ((first, expected[routing.order]), (second, expected)):
        error = (output.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert output.dtype == dtype and float(error.max()) < TOLERANCES[dtype]


CASES = [
    (num_tokens, num_experts, top_k, sizes, dtype, is_transposed)
    for (num_tokens, num_experts), top_k, sizes, dtype, is_transposed in product(
        [(1, 8), (7, 5), (40, 60), (90, 8)], [1, 2, 5, 8], [(24, 40), (70, 33)], TOLERANCES, [False, True]
    )
    if top_k <= num_experts
]
QUICK = (7, 5, 2, (70, 33), torch.bfloat16, True)


@pytest.mark.parametrize(
    "case", [case if case == QUICK else pytest.param(case, marks=pytest.mark.deep) for case in CASES]
)
def test_products_are_those_of_the_definition(case: tuple[int, int, int, tuple[int, int], torch.dtype, bool]) -> None:
    *shape, is_transposed = case
    check(*shape, is_transposed=is_transposed)  # type: ignore[arg-type]


@pytest.mark.deep
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_equals_generate(architecture: str) -> None:
    path = cached_checkpoint(architecture)
    loaded = load_unoptimized(path)
    assert replace_experts(loaded.model, expert_linear) is None
    assert any(isinstance(module, FusedExperts) for module in loaded.model.modules())
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=20))
    check_equals_generate(engine, path, random_prompts((5, 30)), max_tokens=4)


def test_right_experts_are_taken_and_wrong_ones_are_not() -> None:
    loaded = load_unoptimized(cached_checkpoint("gpt_oss-window"))
    assert replace_experts(loaded.model, expert_linear, lambda _: False) == "it does not work on another rank"
    assert replace_experts(loaded.model, expert_linear) is None
    assert any(isinstance(module, FusedExperts) for module in loaded.model.modules())
    loaded = load_unoptimized(cached_checkpoint("qwen3_moe"))

    def wrong(*arguments: object, is_first: bool) -> Tensor:
        return expert_linear(*arguments, is_first=is_first) * 1.01  # type: ignore[arg-type]

    fault = replace_experts(loaded.model, wrong)
    assert fault is not None and "the experts" in fault
    assert not any(isinstance(module, FusedExperts) for module in loaded.model.modules())
