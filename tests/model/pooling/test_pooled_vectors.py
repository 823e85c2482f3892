"""Pooled vectors of the real engine against transformers' own model and pooling: alone, packed, chunked, preempted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.errors import SequenceFailed
from replicas.model.attention.cpp import CppAttention
from replicas.model.loading.loaded_model import LoadedModel
from replicas.protocol import (
    Band,
    FinishReason,
    GenerateRequest,
    Pooling,
    PoolParams,
    PoolTask,
    SamplingParams,
    TokenDelta,
)
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import Sizes, build_engine, load, load_compiled, num_preemptions, random_prompts, run
from testkit.model.pooling_checkpoints import PoolingFiles, expected_vectors, write_embedder

LENGTHS = [1, 2, 40, 70, 71, 100, 3, 17]
CASES = {
    "qwen3": PoolingFiles("lasttoken", prompts={"query": "find: "}),
    "mistral-window": PoolingFiles("mean", dense_size=24),
    "gpt2": PoolingFiles("cls", normalizes=False),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PoolingFiles]:
    files = CASES[request.param]
    return write_embedder(tmp_path_factory.mktemp("embedder"), request.param, files), files


def requests(loaded: LoadedModel, prompts: list[tuple[int, ...]]) -> list[GenerateRequest]:
    assert loaded.head is not None
    pool = PoolParams(PoolTask.EMBED, loaded.head.card.pooling)
    params = SamplingParams(max_tokens=0, pool=pool)
    return [GenerateRequest(f"text-{index}", prompt, params) for index, prompt in enumerate(prompts)]


def vectors(outputs: list[TokenDelta]) -> torch.Tensor:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP}
    return torch.tensor(np.stack([np.frombuffer(output.pooled, "<f4") for output in outputs]))


def test_vectors_are_those_of_transformers(case: tuple[Path, PoolingFiles]) -> None:
    """Alone, packed among others in chunks, beside outputs of the same model, and with preemptions."""
    path, files = case
    loaded, prompts = load(path), random_prompts(LENGTHS)
    asked, expected = requests(loaded, prompts), expected_vectors(path, prompts, files)
    alone = [run(build_engine(loaded), [request], loaded.head)[0] for request in asked]
    torch.testing.assert_close(vectors(alone), expected, atol=1e-5, rtol=0)
    chats = [
        GenerateRequest(f"chat-{index}", prompt, SamplingParams(max_tokens=12, temperature=0.0))
        for index, prompt in enumerate(random_prompts([20, 50, 5], seed=3))
    ]
    only_chats = run(build_engine(loaded), chats)
    for is_ahead in (False, True):
        engine = build_engine(loaded, Sizes(max_num_batched_tokens=24), is_ahead=is_ahead)
        mixed = run(engine, [*chats, *asked], loaded.head)
        torch.testing.assert_close(vectors(mixed[len(chats) :]), expected, atol=1e-5, rtol=0)
        assert [output.token_ids for output in mixed[: len(chats)]] == [output.token_ids for output in only_chats]
        assert engine.stats().num_free_blocks == Sizes().num_blocks


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_preempted_text_is_pooled_anew(case: tuple[Path, PoolingFiles], is_ahead: bool) -> None:
    path, files = case
    loaded, (text, chat) = load(path), random_prompts([100, 60])
    assert loaded.head is not None
    engine = build_engine(loaded, Sizes(num_blocks=8, max_num_batched_tokens=24), is_ahead=is_ahead)
    (asked,) = requests(loaded, [text])
    assert asked.params.pool is not None
    engine.add(replace(asked, band=Band.BATCH), pooler=loaded.head.pooler(asked.params.pool, len(text)))
    outputs = [delta for _ in range(3) for delta in engine.step()]
    engine.add(GenerateRequest("chat", chat, SamplingParams(max_tokens=5), Band.INTERACTIVE))
    while engine.has_work:
        outputs += engine.step()
        engine.check_invariants()
    assert num_preemptions(engine) > 0
    pooled = [output for output in outputs if output.request_id == asked.request_id]
    torch.testing.assert_close(vectors(pooled), expected_vectors(path, [text], files), atol=1e-5, rtol=0)


def test_a_cached_prefix_is_reused_where_the_last_state_alone_is_pooled(case: tuple[Path, PoolingFiles]) -> None:
    path, files = case
    loaded, (prefix, *ends) = load(path), random_prompts([64, 5, 9])
    prompts = [prefix + end for end in ends]
    engine = build_engine(loaded)
    outputs = [run(engine, [replace(request, request_id="r")], loaded.head)[0] for request in requests(loaded, prompts)]
    torch.testing.assert_close(vectors(outputs), expected_vectors(path, prompts, files), atol=1e-5, rtol=0)
    assert loaded.head is not None
    assert outputs[1].usage.cached_tokens == (64 if loaded.head.card.pooling is Pooling.LAST else 0)


@pytest.mark.usefixtures("kernels")
def test_the_compiled_kernels_give_the_same_vectors(case: tuple[Path, PoolingFiles]) -> None:
    path, files = case
    if "gpt2" in (path / "config.json").read_text():
        pytest.skip("its heads have no compiled kernel")
    loaded, prompts = load_compiled(path), random_prompts(LENGTHS)
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=32), CppAttention)
    outputs = run(engine, requests(loaded, prompts), loaded.head)
    torch.testing.assert_close(vectors(outputs), expected_vectors(path, prompts, files), atol=1e-5, rtol=0)


def test_a_state_that_is_not_finite_fails_its_text_alone(tmp_path: Path) -> None:
    loaded = load(write_embedder(tmp_path, "llama", PoolingFiles()))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[5] = float("nan")
    outputs = run(build_engine(loaded), requests(loaded, [(3, 5), (3, 4)]), loaded.head)
    assert isinstance(outputs[0].error, SequenceFailed) and outputs[1].error is None


def test_a_model_without_these_files_has_no_pooling() -> None:
    assert load(cached_checkpoint("llama")).head is None
