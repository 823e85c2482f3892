"""FlashAttention 3 is told what it needs to be told, where it is installed, and is not used where it proves wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.attention import select
from replicas.model.attention.flash import FlashAttention, FlashBackend
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionSpec
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.select import FlashAndTriton, choose_attention
from replicas.model.batch.dummy import dummy_item
from replicas.model.batch.inputs import BatchInputs, build_inputs
from replicas.model.loading.loader import LoadedModel
from replicas.protocol import SamplingParams
from testkit.model import flash_stand_in
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    random_prompts,
    reference_model,
    reference_tokens,
    tokens,
)
from testkit.model.paged_cases import KINDS, MIXTURES, TOLERANCES, Case, largest_error
from testkit.model.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")
SERVED = {name: kind for name, kind in KINDS.items() if not kind.has_sinks}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_stand_in.flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return module


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_equals_attention_by_definition(kind: Case, mixture: str) -> None:
    assert largest_error(kind.of(MIXTURES[mixture]), FlashBackend(kind.dtype, CPU), CPU) < TOLERANCES[kind.dtype]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "gemma2-window", with_tokenizer=False)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load(path)


@pytest.mark.usefixtures("installed")
def test_equals_generate(loaded: LoadedModel, path: Path) -> None:
    prompts = random_prompts((5, 30, 70))
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=20), FlashBackend(torch.float32, CPU))
    outputs = tokens(engine, prompts, SamplingParams(max_tokens=8, temperature=0.0))
    assert outputs == reference_tokens(reference_model(path), prompts, max_tokens=8)


class Decodes:
    """In the place of Triton's kernels, which need a GPU."""

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> GatherAttention:
        return GatherAttention(cache, inputs)

    planned = None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, torch.dtype, int], AttentionBackend]:
    """What is chosen for a device of a capability, where Triton's kernels work and tensors are on the CPU."""
    check = select.check_attention
    monkeypatch.setattr(select, "check_attention", lambda spec, *rest: check(replace(spec, device=CPU), *rest))
    monkeypatch.setattr(select, "_triton", lambda spec: Decodes())

    def choose(backend: str, dtype: torch.dtype, capability: int) -> AttentionBackend:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        layer = KINDS["window"].layer
        return choose_attention(AttentionSpec((layer,), 16, dtype, torch.device("cuda")), backend)

    return choose


@pytest.mark.usefixtures("installed")
def test_where_it_proves_right_it_gets_the_batches_with_prompts(on_a_gpu: Any) -> None:
    for backend in ("auto", "flash"):
        chosen = on_a_gpu(backend, torch.bfloat16, 9)
        assert isinstance(chosen, FlashAndTriton)
        cache = KVCache([KINDS["window"].layer], 8, 16, torch.float32, CPU)
        items = [dummy_item(0, 5, 16), dummy_item(3, 1, 16)]
        assert isinstance(chosen(cache, build_inputs(items, 16, CPU)), FlashAttention)
        assert isinstance(chosen(cache, build_inputs(items[1:], 16, CPU)), GatherAttention)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, 9), (torch.bfloat16, 8), (torch.bfloat16, 10)])
def test_it_is_not_even_tried_where_it_would_end_the_process(
    on_a_gpu: Any, dtype: torch.dtype, capability: int, installed: ModuleType
) -> None:
    installed.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    assert isinstance(on_a_gpu("auto", dtype, capability), Decodes)
    with pytest.raises(ModelLoadError, match="it is not made for"):
        on_a_gpu("flash", dtype, capability)


def test_where_it_is_not_installed_one_who_asks_is_told(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModelLoadError, match="'flash', which does not work here: the package flash_attn_interface"):
        choose_attention(loaded.attention_spec(16), "flash")


def reads_what_it_masks(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: object) -> Tensor:
    """As a kernel would that multiplies what lies behind the last key by zero."""
    right = flash_stand_in.flash_attn_with_kvcache(q, k_cache, v_cache, **options)  # type: ignore[arg-type]
    return right + 0.0 * v_cache.sum()


def forgets_the_scale(*arguments: Tensor, **options: object) -> Tensor:
    return flash_stand_in.flash_attn_with_kvcache(*arguments, **{**options, "softmax_scale": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [reads_what_it_masks, forgets_the_scale])
def test_where_it_proves_wrong_it_is_not_used(wrong: object, loaded: LoadedModel, installed: ModuleType) -> None:
    installed.flash_attn_with_kvcache = wrong  # type: ignore[attr-defined]
    with pytest.raises(ModelLoadError, match="differs from plain torch"):
        choose_attention(loaded.attention_spec(16), "flash")
    assert choose_attention(loaded.attention_spec(16), "gather") is GatherAttention


@pytest.mark.usefixtures("installed")
def test_layers_with_sinks_are_for_other_backends(tmp_path: Path) -> None:
    with_sinks = load(write_checkpoint(tmp_path, "gpt_oss-window", with_tokenizer=False))
    with pytest.raises(ModelLoadError, match="sinks"):
        choose_attention(with_sinks.attention_spec(16), "flash")
