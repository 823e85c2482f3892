"""Operations under `batch_invariant`: a row has the same bits alone and among others."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime import interpreter

from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.probe import dry_forward
from replicas.model.attention.triton import TritonBackend
from replicas.model.batch.inputs import batches_of_every_kind
from replicas.model.hardware.device import compute_capability
from replicas.model.layers import batch_invariant, invariant_tiles
from replicas.model.layers.batch_invariant import BatchInvariantOps, DependsOnBatch, check_products, refuse_others
from replicas.model.layers.optimize import cuda_modules, optimize_model
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling import sampler
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams
from testkit.model.engine_runs import Sizes, build_engine, load_unoptimized, num_preemptions, random_prompts, run
from testkit.model.paged_cases import KINDS, TOLERANCES, Chunks, attention_outputs, largest_error
from testkit.model.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
CAPABILITY = compute_capability(CPU)
PART_KEYS = 64


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT, BIAS = drawn(70, 150, seed=1), drawn(70, seed=2)
OPERATIONS = {
    "linear": lambda rows: functional.linear(rows, WEIGHT, BIAS),
    "a transposed product": lambda rows: torch.addmm(BIAS, rows, WEIGHT.t().contiguous()),
    "matmul": lambda rows: rows @ WEIGHT.t(),
    "mean": lambda rows: rows.pow(2).mean(-1, keepdim=True),
    "sum": lambda rows: rows[:, :6].view(len(rows), 3, 2).sum(dim=1),
    "logsumexp": lambda rows: rows.logsumexp(dim=-1, keepdim=True),
    "softmax": lambda rows: rows.softmax(-1),
}


class _ExactProducts:
    """NumPy for Triton's interpreter, with products of tiles whose rows do not depend on their place in a tile.

    NumPy's own are summed by a BLAS library, on some processors in an order that depends on the row. Here the products
    of single-precision numbers are exact, and their sums have no error that single precision shows.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "np", _ExactProducts())


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_is_the_same_alone_and_among_others(name: str) -> None:
    operation, rows = OPERATIONS[name], drawn(101, 150)
    with torch.inference_mode():
        expected = operation(rows)
        with BatchInvariantOps():
            together = operation(rows)
            torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-4)
            for first, last in ((0, 1), (40, 41), (7, 80), (100, 101)):
                assert torch.equal(operation(rows[first:last]), together[first:last])


@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.deep)])
def test_rows_are_the_same_on_both_sides_of_each_tile_switch(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of the sums in programs of their own, and in one program; the last part is not full."""
    in_size, out_size = 1100, 200
    monkeypatch.setattr(batch_invariant, "compute_capability", lambda _: capability)
    monkeypatch.setattr(invariant_tiles, "_MAX_SPLIT_PROGRAMS", 8)
    invariant_tiles.divide.cache_clear()
    rows, weight, bias = drawn(130, in_size), drawn(out_size, in_size), drawn(out_size)
    rows, weight, bias = (some.half() for some in (rows, weight, bias))
    together = batch_invariant.multiply_rows(rows, weight.t(), bias)
    torch.testing.assert_close(together, functional.linear(rows, weight, bias), atol=0.1, rtol=0.02)
    numbers = (16, 17, 65)
    for number in numbers:
        assert torch.equal(batch_invariant.multiply_rows(rows[:number], weight.t(), bias), together[:number])
    divisions = {invariant_tiles.divide(capability, in_size, out_size, 2, number) for number in (*numbers, len(rows))}
    invariant_tiles.divide.cache_clear()
    assert {one.is_split for one in divisions} == {True, False} and {one.num_parts for one in divisions} == {4}


def test_the_mode_is_what_keeps_the_order() -> None:
    """Without it some sum of a row depends on the number of rows, on this processor too."""
    rows, weight = drawn(101, 600), drawn(70, 600, seed=1)
    together = functional.linear(rows, weight)
    with BatchInvariantOps():
        kept = functional.linear(rows, weight)
        alone = [functional.linear(rows[row : row + 1], weight) for row in range(0, 101, 20)]
    assert torch.equal(torch.cat(alone), kept[::20]) and not torch.equal(kept, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_pass_their_check(dtype: torch.dtype) -> None:
    assert check_products(dtype, CPU) is None


@pytest.mark.parametrize(
    "operation",
    [
        lambda rows: torch.bmm(rows[None], rows.t()[None]),
        lambda rows: rows.cumsum(dim=-1),
        lambda rows: rows.var(dim=-1),
        lambda rows: torch.einsum("ij,kj->ik", rows, rows),
        lambda rows: rows.sum(),
        lambda rows: rows.mean(),
        lambda rows: torch.sum(rows, dim=1, out=torch.empty(5)),
        lambda rows: torch.mm(rows, rows.t(), out=torch.empty(5, 5)),
        lambda rows: torch.logsumexp(rows, dim=1, out=torch.empty(5)),
        lambda rows: rows.index_put((torch.tensor([0, 0]),), drawn(2, 9), accumulate=True),
        lambda rows: rows.scatter_reduce(0, torch.zeros(5, 9, dtype=torch.int64), rows, "sum"),
    ],
)
def test_operations_without_a_kernel_are_refused(operation: object) -> None:
    with torch.inference_mode(), BatchInvariantOps(), pytest.raises(DependsOnBatch):
        operation(drawn(5, 9))  # type: ignore[operator]


def test_products_of_one_number_have_no_order() -> None:
    """As rotary position encodings compute their angles."""
    frequencies, positions = drawn(1, 8, 1), drawn(1, 1, 6)
    with torch.inference_mode(), BatchInvariantOps():
        assert torch.equal(frequencies @ positions, frequencies * positions)


def test_products_of_heads_with_a_layers_weights_are_those_of_a_row_alone() -> None:
    """As latent attention has them. Other batched products are refused."""
    rows, weights = drawn(3, 70, 40), torch.nn.Parameter(drawn(3, 40, 24), requires_grad=False)
    with torch.inference_mode(), BatchInvariantOps():
        products = torch.bmm(rows, weights)
        assert all(torch.equal(torch.bmm(rows[:, i : i + 1], weights), products[:, i : i + 1]) for i in (0, 33, 69))
    torch.testing.assert_close(products, rows @ weights)


def random_chunks(rng: random.Random) -> Chunks:
    starts = rng.sample([0, 1, 15, 63, 64, 100, 127, 129], rng.randint(1, 3))
    return tuple((start, start + rng.choice([1, 1, 2, 17, 40])) for start in starts)


@pytest.mark.parametrize(
    "kind", ["window", *(pytest.param(name, marks=pytest.mark.deep) for name in ("plain", "all", "sinks", "float16"))]
)
def test_attention_of_a_token_depends_on_its_sequence_alone(kind: str) -> None:
    """Whether it is decoded or part of a chunk, wherever the chunk begins, and whatever shares the batch."""
    rng = random.Random(kind)
    case, backend = KINDS[kind], TritonBackend(132, CAPABILITY, part_keys=PART_KEYS)
    whole = case.of(((0, 150),))
    assert largest_error(whole, backend, CPU) < TOLERANCES[case.dtype]
    (expected,) = attention_outputs(whole, backend, CPU)
    for _ in range(2):
        start, num_tokens = rng.choice([1, 63, 64, 65, 130, 139]), rng.choice([1, 1, 5, 11])
        # The numbers of a sequence follow from its place in the batch: the first one stays.
        chunks = ((start, start + num_tokens), *random_chunks(rng))
        found = attention_outputs(case.of(chunks), backend, CPU)[0]
        assert torch.equal(found, expected[start : start + num_tokens])


@pytest.fixture
def draws_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "has_draw_kernel", lambda _: True)


@pytest.mark.usefixtures("draws_in_the_interpreter")
def test_the_steps_of_a_start_have_no_operation_that_is_refused(tmp_path: Path) -> None:
    """They have every kind of sampling: masks, bias, penalties, log probabilities and draws."""
    path = write_checkpoint(tmp_path, "gpt2", with_tokenizer=False, n_layer=1)
    loaded = replace(load_unoptimized(path), is_batch_invariant=True)
    runner = TorchModelRunner(loaded, KVCache(loaded.layers, 0, 16, loaded.dtype, loaded.device), GatherAttention)
    for batch in batches_of_every_kind(4, 16)[:9]:  # The others mix the same kinds.
        assert all(result.token_id is not None for result in runner.execute(batch))


@pytest.mark.deep
@pytest.mark.usefixtures("draws_in_the_interpreter")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe", "gemma2-window", "deepseek_v3"])
def test_tokens_and_log_probabilities_depend_on_the_request_alone(tmp_path: Path, architecture: str) -> None:
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    loaded = replace(load_unoptimized(path), is_batch_invariant=True)
    optimize_model(loaded.model, loaded.port, loaded.layers, cuda_modules(torch.float32, CPU, batch_invariant=True))
    refuse_others(architecture, lambda: dry_forward(loaded.model, loaded.port, [3, 4, 5, 6]))
    backend = TritonBackend(132, CAPABILITY, part_keys=PART_KEYS)
    params = [
        SamplingParams(max_tokens=6, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=6, seed=4, logprobs=1),
        SamplingParams(max_tokens=6, top_p=0.8, seed=5, prompt_logprobs=1),
        SamplingParams(max_tokens=6, seed=6, allowed_token_ids=(3, 5, 8, 13), logit_bias=(LogitBias(5, 1.5),)),
    ]
    requests = [
        GenerateRequest(f"request-{index}", prompt, params[index])
        for index, prompt in enumerate(random_prompts((4, 4, 4, 4)))
    ]
    alone = [run(build_engine(loaded, Sizes(), backend), [request])[0] for request in requests]
    # Chunks of few tokens, other sequences beside them, padded steps, and so few blocks that some are computed twice.
    tight = Sizes(num_blocks=10, block_size=2, max_num_batched_tokens=6, max_num_seqs=3)
    engine = build_engine(loaded, tight, backend, backend.planned)
    together = run(engine, requests)
    for one, other in zip(alone, together, strict=True):
        assert one.error is None and other.error is None and one.token_ids == other.token_ids
        assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)
    assert num_preemptions(engine) > 0


def test_without_the_option_attention_depends_on_the_batch() -> None:
    case, backend = KINDS["plain"], TritonBackend(4, CAPABILITY)
    (alone,) = attention_outputs(case.of(((700, 701),)), backend, CPU)
    among_others = attention_outputs(case.of(((700, 701), *((600, 601) for _ in range(3)))), backend, CPU)[0]
    assert not torch.equal(alone, among_others)
