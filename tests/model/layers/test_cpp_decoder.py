"""The decoder that runs all layers in one call of the kernels computes what it computes layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from replicas.model.attention.cpp import CppAttention
from replicas.model.layers.cpp_decoder import CppDecoder
from replicas.model.layers.fused_decoder import FusedDecoder
from replicas.model.loading.loader import LoadedModel
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import Sizes, build_engine, load, random_prompts, run
from testkit.model.tiny_checkpoints import write_checkpoint
from tests.model.exactness.test_cpp import load_compiled
from tests.model.layers.test_fused_decoder import VARIANTS, with_random_biases

pytestmark = pytest.mark.usefixtures("kernels_in_threads")
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5)
# Longer than what the kernels' own linear layers multiply at once, and shorter.
LENGTHS = (150, 3, 40, 17)
SIZES = Sizes(num_blocks=64, max_num_batched_tokens=200)


def requests(lengths: Iterable[int] = LENGTHS) -> list[GenerateRequest]:
    return [GenerateRequest(f"request-{len(prompt)}", prompt, PARAMS) for prompt in random_prompts(lengths)]


def outputs(loaded: LoadedModel, lengths: Iterable[int] = LENGTHS) -> list[tuple[list[int], object]]:
    """Tokens and log probabilities, to the last bit."""
    engine = build_engine(loaded, SIZES, CppAttention)
    return [(output.token_ids, output.logprobs) for output in run(engine, requests(lengths))]


def check_bits(loaded: LoadedModel, lengths: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """That all layers run at once, and give what they give one by one."""
    assert isinstance(loaded.model.model, CppDecoder)
    found = outputs(loaded, lengths)

    def refuse(*_: object) -> None:
        raise AssertionError("layers ran one by one")

    with monkeypatch.context() as patched:
        patched.setattr(FusedDecoder, "_run_layers", refuse)
        assert outputs(loaded, lengths) == found
    monkeypatch.setattr(CppDecoder, "_run_layers", FusedDecoder._run_layers)
    assert outputs(loaded, lengths) == found


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_all_layers_at_once_give_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    changes: dict[str, object],
    dtype: str,
    quantization: str,
) -> None:
    if "head_dim" in changes:
        changes = {"head_dim": 32}  # 24 is no size of the kernels'.
    loaded = load_compiled(
        with_random_biases(write_checkpoint(tmp_path, architecture, with_tokenizer=False, **changes)),
        dtype,
        quantization,
    )
    check_bits(loaded, LENGTHS, monkeypatch)


def test_a_long_context_that_threads_divide_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, "llama", with_tokenizer=False, max_position_embeddings=1024)
    check_bits(load_compiled(path, max_model_len=1000), (900,), monkeypatch)


def test_a_layer_that_the_kernels_cannot_multiply_is_left_to_the_fused_decoder(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", with_tokenizer=False, intermediate_size=50)
    loaded = load_compiled(path)
    assert isinstance(loaded.model.model, CppDecoder)
    expected = load(path)
    found = [tokens for tokens, _ in outputs(loaded)]
    assert found == [output.token_ids for output in run(build_engine(expected, SIZES), requests())]
