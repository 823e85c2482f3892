"""Gates in the kernel of the rule: the tokens of `generate()`, for the layers of that form alone."""

import pytest
import torch

from replicas.model.attention import fused_gates
from replicas.model.attention.fused_gates import fuse_gates
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint, cached_reference
from testkit.model.engine_runs import Sizes, build_engine, load, random_prompts, tokens

PROMPTS = random_prompts((33, 90, 5))


def test_output_is_that_of_generate() -> None:
    loaded = load(cached_checkpoint("qwen3_5_text-16"))
    assert fuse_gates(loaded.port.recurrent) == 3
    expected = cached_reference("qwen3_5_text-16", PROMPTS, 64)
    engine = build_engine(loaded, Sizes(num_blocks=17, num_state_slots=7))
    assert tokens(engine, PROMPTS, SamplingParams(max_tokens=64, temperature=0.0)) == expected


@pytest.mark.parametrize(
    ("architecture", "number"), [("qwen3_5_moe_text", 3), ("qwen3_next", 0), ("nemotron_h", 0), ("lfm2", 0)]
)
def test_layers_of_another_form_stay(architecture: str, number: int) -> None:
    assert fuse_gates(load(cached_checkpoint(architecture)).port.recurrent) == number


def test_a_layer_with_other_numbers_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    recurrent = load(cached_checkpoint("qwen3_5_text-16")).port.recurrent
    before = [mixer.forward for mixer in recurrent.mixers]
    monkeypatch.setattr(fused_gates, "mix", lambda _, __, hidden_states: torch.zeros_like(hidden_states))
    assert fuse_gates(recurrent) == 0
    assert [mixer.forward for mixer in recurrent.mixers] == before
    assert "the gates of recurrent layers are computed apart: a gated delta net" in caplog.text
