"""In bfloat16 the compiled CPU path is batch-invariant: neighbours, chunks, prefix hits and preemption change no token.

Each row's sums have one order there, whatever shares the step. A constraint changes nothing about that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replicas.engine.engine import Engine
from replicas.model.attention.cpp import CppAttention
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions
from replicas.protocol import GenerateRequest, SamplingParams, TokenDelta, merge
from replicas.text.grammar import GrammarCompiler, json_schema_grammar
from serve_app.openai.structured.json_schema import enforceable_schema
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import Sizes, build_engine, load_compiled, num_preemptions, random_prompts, run
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from tests.unit.text.test_grammar import DEMO

pytestmark = pytest.mark.rotated

PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=3)
PROMPTS = random_prompts((5, 33, 60, 90, 20, 100, 7, 50, 64, 41), seed=3)
ALONE = Sizes(num_blocks=128, max_num_batched_tokens=512)
WAYS = {
    "with others, in steps of 64 tokens": Sizes(num_blocks=128, max_num_batched_tokens=64, max_num_seqs=16),
    "with others, in steps of 512 tokens": Sizes(num_blocks=128, max_num_batched_tokens=512, max_num_seqs=16),
    "by three, in chunks of 9 tokens": Sizes(num_blocks=128, max_num_batched_tokens=9, max_num_seqs=3),
}
SCARCE = Sizes(num_blocks=36, block_size=4, max_num_batched_tokens=40, max_num_seqs=8)


def requests() -> list[GenerateRequest]:
    return [GenerateRequest(f"r{index}", prompt, replace(PARAMS, seed=index)) for index, prompt in enumerate(PROMPTS)]


def tokens(outputs: list[TokenDelta]) -> list[tuple[int, ...]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


def engine(loaded: LoadedModel, sizes: Sizes) -> Engine:
    return build_engine(loaded, sizes, CppAttention)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "cohere2-window", "gemma2-window", "phi3-window", "gpt2", "minicpm3"]
)
def test_no_token_depends_on_its_company(architecture: str) -> None:
    need_kernels()
    check_batch_invariance(load_compiled(cached_checkpoint(architecture), "bfloat16"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["AWQ", None])
def test_no_token_of_4_bit_weights_depends_on_its_company(tmp_path: Path, method: str | None) -> None:
    need_kernels()
    path = cached_checkpoint("llama")
    if method is None:
        loaded = load_compiled(path, "bfloat16", "int4")
    else:
        loaded = load_compiled(quantize_checkpoint(path, tmp_path, METHODS[method]), "bfloat16")
        assert loaded.weights == "AWQ, 4-bit, kept in 4 bits"
    check_batch_invariance(loaded)


def check_batch_invariance(loaded: LoadedModel) -> None:
    """Check that each request's tokens are the same alone, with others, in chunks, by prefix hits and preempted."""
    alone = engine(loaded, ALONE)
    expected = [tokens(run(alone, [request]))[0] for request in requests()]
    assert len({token for output in expected for token in output}) > 20, "the model must say something to compare"
    for way, sizes in WAYS.items():
        assert tokens(run(engine(loaded, sizes), requests())) == expected, way
    assert tokens(run(alone, requests())) == expected, "prefix hits"
    scarce = engine(loaded, SCARCE)
    assert tokens(run(scarce, requests())) == expected, "preemption"
    assert num_preemptions(scarce) > 0


def document_requests(number: int) -> list[GenerateRequest]:
    """Return requests for documents of schemas that differ."""
    made = []
    for index in range(number):
        names = [f"field {index}", "other"]
        properties = {name: {"type": "string", "minLength": 20, "maxLength": 40} for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        grammar = json_schema_grammar(enforceable_schema(schema, "schema").schema)
        params = SamplingParams(max_tokens=100, temperature=0.9, seed=index, grammar=grammar)
        made.append(GenerateRequest(f"d{index}", tuple(DEMO.encode(f"{index} is a number and ")), params))
    return made


def documents(engine: Engine, asked: list[GenerateRequest]) -> list[tuple[int, ...]]:
    compiler = GrammarCompiler(DEMO)
    for request in asked:
        engine.add(request, compiler.constraint_of(request))
    parts: dict[str, list[TokenDelta]] = {request.request_id: [] for request in asked}
    while engine.has_work:
        for delta in engine.step():
            parts[delta.request_id].append(delta)
        engine.check_invariants()
    return tokens([merge(parts[request.request_id]) for request in asked])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["synchronous", "ahead"])
def test_structured_documents_survive_preemption_and_resumption(dtype: str, is_ahead: bool) -> None:
    need_kernels()
    loaded = load_model(ModelOptions("replicas/demo", dtype=dtype, device="cpu"))  # type: ignore[arg-type]
    asked = document_requests(8)
    expected = documents(build_engine(loaded, replace(ALONE, max_num_seqs=1), CppAttention), asked)
    scarce = build_engine(loaded, Sizes(num_blocks=14, max_num_batched_tokens=40), CppAttention, is_ahead=is_ahead)
    assert documents(scarce, asked) == expected
    assert num_preemptions(scarce) > 0
    cut = [len(output) // 2 for output in expected]
    resumed = [
        replace(request, output_token_ids=output[:length])
        for request, output, length in zip(asked, expected, cut, strict=True)
    ]
    rest = documents(build_engine(loaded, replace(ALONE, max_num_seqs=5), CppAttention, is_ahead=is_ahead), resumed)
    assert rest == [output[length:] for output, length in zip(expected, cut, strict=True)]
