"""Layers that went through torch.compile compute what they computed before, whatever the steps look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.model.attention import ATTENTION_NAME, AttentionPort, register_attention
from replicas.model.compiled_layers import compile_layers
from replicas.model.loader import LoadedModel
from replicas.model.probe import probe_attention
from replicas.protocol import SamplingParams
from tests.model.serving import Sizes, build_engine, random_prompts, reference_model, reference_tokens, tokens
from tests.model.tiny import write_checkpoint


def with_compiled_layers(path: Path, backend: str) -> LoadedModel:
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()
    port = AttentionPort(model)
    layers = probe_attention(model, port)
    assert compile_layers(model, port, backend)
    return LoadedModel(
        model_id=str(path), model=model, port=port, layers=layers, tokenizer=None, max_model_len=128,
        vocab_size=model.config.get_text_config().vocab_size, eos_token_ids=frozenset(), dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


# Without the compiler's code generator, which takes a minute: what it would be given is traced, and run as it is.
@pytest.mark.parametrize(("architecture", "num_kinds"), [("gemma2-window", 2), ("phi3", 1)])
def test_equals_generate_and_compiles_each_kind_of_layer_for_one_token_and_for_many(
    tmp_path: Path, architecture: str, num_kinds: int
) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    prompts = random_prompts((5, 30, 70))
    engine = build_engine(with_compiled_layers(path, "aot_eager"), Sizes(max_num_batched_tokens=20))
    outputs = tokens(engine, prompts, SamplingParams(max_tokens=8, temperature=0.0))
    assert outputs == reference_tokens(reference_model(path), prompts, max_tokens=8)
    assert counters["stats"]["unique_graphs"] == 2 * num_kinds
    assert not counters["graph_break"]


def wrong(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
    """A compiler whose code computes something else."""
    return lambda *inputs: tuple(one * 1.5 if isinstance(one, torch.Tensor) else one for one in graph(*inputs))


def broken(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
    raise OSError("no C compiler")


@pytest.mark.parametrize(("backend", "fault"), [(wrong, "differs from plain torch"), (broken, "no C compiler")])
def test_a_compiler_that_proves_wrong_or_fails_is_not_used(
    tmp_path: Path, backend: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    register_attention()
    path = write_checkpoint(tmp_path, "phi3", with_tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()
    port = AttentionPort(model)
    layers = probe_attention(model, port)
    assert not compile_layers(model, port, backend)
    assert fault in caplog.text
    assert probe_attention(model, port) == layers
