"""FlashAttention 3 and Triton's kernels are used where they work, and are replaced where they prove wrong."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.attention import select
from replicas.model.attention.flash import FlashAttention, FlashBackend
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionCall, AttentionSpec
from replicas.model.attention.kv_cache import KVCache, LayerCache
from replicas.model.attention.select import FlashAndTriton, choose_attention
from replicas.model.batch.inputs import BatchInputs, build_inputs, dummy_item
from replicas.model.hardware.selfcheck import Agree, alone
from replicas.model.loading.loaded_model import LoadedModel
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    check_equals_generate,
    load,
    random_prompts,
)
from testkit.model.paged_cases import KINDS, MIXTURES, TOLERANCES, Case, flash_attn_with_kvcache, largest_error

CPU = torch.device("cpu")
SERVED = {name: kind for name, kind in KINDS.items() if not kind.has_sinks and name != "window-of-1"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install FlashAttention 3 by definition, beside working kernels of Triton."""
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(select, "_triton", lambda spec: Decodes())
    return module


@pytest.mark.sampled(15)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_equals_attention_by_definition(kind: Case, mixture: str) -> None:
    assert largest_error(kind.of(MIXTURES[mixture]), FlashBackend(kind.dtype, CPU), CPU) < TOLERANCES[kind.dtype]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(cached_checkpoint("gemma2-window"))


@pytest.mark.usefixtures("installed")
def test_equals_generate(loaded: LoadedModel) -> None:
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=20), FlashBackend(torch.float32, CPU))
    check_equals_generate(engine, cached_checkpoint("gemma2-window"), random_prompts((5, 30, 70)), max_tokens=8)


class Decodes:
    """In the place of Triton's kernels, which need a GPU."""

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> GatherAttention:
        return GatherAttention(cache, inputs)

    planned = None

    @staticmethod
    def write(layer: LayerCache, slots: Tensor, call: AttentionCall) -> None:
        layer.write(slots, call.key, call.value)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AttentionBackend]:
    """Select a backend for a device of this capability, with tensors on the CPU."""
    check = select.check_attention
    monkeypatch.setattr(select, "check_attention", lambda spec, *rest: check(replace(spec, device=CPU), *rest))

    def choose(backend: str, dtype: torch.dtype, capability: int, agree: Agree = alone) -> AttentionBackend:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        spec = AttentionSpec((KINDS["window"].layer,), 16, 512, dtype, torch.device("cuda"))
        return choose_attention(spec, backend, agree)

    return choose


@pytest.mark.usefixtures("installed")
def test_right_flash_attention_gets_batches_with_prompts(on_a_gpu: Any) -> None:
    for backend in ("auto", "flash"):
        chosen = on_a_gpu(backend, torch.bfloat16, 9)
        assert isinstance(chosen, FlashAndTriton)
        cache = KVCache([KINDS["window"].layer], 8, 16, torch.float32, CPU)
        items = [dummy_item(0, 5, 16), dummy_item(3, 1, 16)]
        attention = chosen(cache, build_inputs(items, 16, CPU))
        assert isinstance(attention, FlashAttention) and attention.write is Decodes.write
        assert isinstance(chosen(cache, build_inputs(items[1:], 16, CPU)), GatherAttention)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("num_agreed", "expected"), [(0, "GatherAttention"), (1, "Decodes"), (2, "FlashAndTriton")])
def test_kernels_that_another_rank_lacks_are_not_used(on_a_gpu: Any, num_agreed: int, expected: str) -> None:
    verdicts: list[bool] = []

    def agree(verdict: bool) -> bool:
        verdicts.append(verdict)
        return verdict and len(verdicts) <= num_agreed

    chosen = on_a_gpu("auto", torch.bfloat16, 9, agree)
    assert getattr(chosen, "__name__", type(chosen).__name__) == expected
    assert verdicts == [True] * min(num_agreed + 1, 2), "each rank is asked about the same kernels"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, 9), (torch.bfloat16, 8), (torch.bfloat16, 10)])
def test_flash_is_not_called_where_it_would_end_the_process(
    on_a_gpu: Any, dtype: torch.dtype, capability: int, installed: ModuleType
) -> None:
    installed.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    assert isinstance(on_a_gpu("auto", dtype, capability), Decodes)
    with pytest.raises(ModelLoadError, match="it is not made for"):
        on_a_gpu("flash", dtype, capability)


def test_flash_does_not_serve_windows_shorter_than_a_block() -> None:
    spec = AttentionSpec((KINDS["window-of-1"].layer,), 16, 512, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ModelLoadError, match="shorter than a block of 16 tokens"):
        choose_attention(spec, "flash")


def test_missing_flash_attention_is_named(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModelLoadError, match="'flash', which does not work here: the package flash_attn_interface"):
        choose_attention(loaded.attention_spec(16), "flash")


def reads_what_it_masks(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: object) -> Tensor:
    """Attend like a kernel that multiplies the slots behind the last key by zero."""
    return flash_attn_with_kvcache(q, k_cache, v_cache, **options) + 0.0 * v_cache.sum()  # type: ignore[arg-type]


def forgets_the_scale(*arguments: Tensor, **options: object) -> Tensor:
    return flash_attn_with_kvcache(*arguments, **{**options, "softmax_scale": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [reads_what_it_masks, forgets_the_scale])
def test_wrong_flash_attention_is_not_used(wrong: object, loaded: LoadedModel, installed: ModuleType) -> None:
    installed.flash_attn_with_kvcache = wrong  # type: ignore[attr-defined]
    with pytest.raises(ModelLoadError, match="differs from plain torch"):
        choose_attention(loaded.attention_spec(16), "flash")
    assert choose_attention(loaded.attention_spec(16), "gather") is GatherAttention


@pytest.mark.usefixtures("installed")
def test_layers_with_sinks_are_for_other_backends() -> None:
    with_sinks = load(cached_checkpoint("gpt_oss-window"))
    with pytest.raises(ModelLoadError, match="sinks"):
        choose_attention(with_sinks.attention_spec(16), "flash")


def test_cpu_runs_triton_only_on_demand(loaded: LoadedModel) -> None:
    pytest.importorskip("triton")
    assert choose_attention(loaded.attention_spec(16), "gather") is GatherAttention
    assert not hasattr(choose_attention(loaded.attention_spec(16), "auto"), "planned")
    with pytest.raises(ModelLoadError, match=r"'triton', which does not work here: .*Error: "):
        choose_attention(loaded.attention_spec(16), "triton")
    with pytest.raises(ModelLoadError, match="'fast'; it must be one of auto, flash, triton, gather"):
        choose_attention(loaded.attention_spec(16), "fast")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens where kernels do not work")
def test_kernels_that_do_not_work_are_replaced_with_a_warning(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    assert choose_attention(replace(loaded, device=torch.device("cuda")).attention_spec(16), "auto") is GatherAttention
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton's kernels do not work here: " in caplog.text


def test_without_triton_all_else_works(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("replicas.model.") and ".triton" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    choose_attention(loaded.attention_spec(16), "auto")
    assert choose_attention(replace(loaded, device=torch.device("cuda")).attention_spec(16), "auto") is GatherAttention
    assert "import of triton halted" in caplog.text
    with pytest.raises(ModelLoadError, match="'triton', which does not work here: import of triton halted"):
        choose_attention(loaded.attention_spec(16), "triton")
    invariant = replace(loaded, is_batch_invariant=True).attention_spec(16)
    with pytest.raises(ModelLoadError, match=r"^batch_invariant is true, which needs triton; .*import of triton"):
        choose_attention(invariant, "auto")


@pytest.mark.parametrize("backend", ["flash", "gather"])
def test_other_backends_than_tritons_are_refused_if_batches_must_not_matter(backend: str) -> None:
    device = torch.device("cuda")
    spec = AttentionSpec((KINDS["window"].layer,), 16, 512, torch.float32, device, is_batch_invariant=True)
    with pytest.raises(ModelLoadError, match=f"attention_backend is '{backend}', and batch_invariant is true"):
        choose_attention(spec, backend)
