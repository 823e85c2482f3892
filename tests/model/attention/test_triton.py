"""Choice of Triton's kernels, and of the backends that replace them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from replicas.errors import ModelLoadError
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.select import choose_attention
from replicas.model.loading.loader import LoadedModel
from testkit.model.engine_runs import load
from testkit.model.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_checkpoint(tmp_path_factory.mktemp("model"), "llama", with_tokenizer=False))


def test_a_cpu_gets_no_triton_unless_it_is_demanded(loaded: LoadedModel) -> None:
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
    on_cuda = replace(loaded, device=torch.device("cuda"))
    assert choose_attention(on_cuda.attention_spec(16), "auto") is GatherAttention
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
    with pytest.raises(ModelLoadError, match="import of triton halted"):
        choose_attention(loaded.attention_spec(16), "triton")
