"""Log probabilities of prompt tokens equal a plain forward pass, however the prompt is cut up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replicas.protocol import GenerateRequest, SamplingParams, TokenDelta
from testkit.model.engine_runs import Sizes, build_engine, load, random_prompts, reference_model, run
from testkit.model.tiny_checkpoints import write_checkpoint

PROMPTS = random_prompts((1, 2, 40, 180))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), with_tokenizer=False)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[torch.Tensor]:
    """Log probabilities [num_tokens, vocab_size] of each prompt."""
    model = reference_model(checkpoint)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


def requests(params: SamplingParams) -> list[GenerateRequest]:
    return [GenerateRequest(f"request-{i}", prompt, params) for i, prompt in enumerate(PROMPTS)]


def check_prompt_logprobs(output: TokenDelta, prompt: tuple[int, ...], reference: torch.Tensor, num_top: int) -> None:
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for position, logprobs in enumerate(output.prompt_logprobs):
        assert logprobs.chosen.token_id == prompt[position + 1]
        assert logprobs.chosen.logprob == pytest.approx(float(reference[position, prompt[position + 1]]), abs=1e-4)
        best = reference[position].topk(num_top)
        assert [entry.token_id for entry in logprobs.top] == best.indices.tolist()
        assert [entry.logprob for entry in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("sizes", [Sizes(max_num_batched_tokens=300), Sizes(), Sizes(num_blocks=56, block_size=4)])
def test_prompt_logprobs_equal_a_plain_forward(checkpoint: Path, reference: list[torch.Tensor], sizes: Sizes) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=3, logprobs=2)
    plain = SamplingParams(max_tokens=12, temperature=0.0)
    engine = build_engine(load(checkpoint), sizes)
    expected = run(engine, requests(plain))
    for output, prompt, logprobs, other in zip(
        run(engine, requests(params)), PROMPTS, reference, expected, strict=True
    ):
        check_prompt_logprobs(output, prompt, logprobs, 3)
        assert output.token_ids == other.token_ids
        assert len(output.logprobs) == 12
        assert output.logprobs[0].chosen.logprob == pytest.approx(float(logprobs[-1].max()), abs=1e-4)


def test_prompt_is_scored_without_generating(checkpoint: Path, reference: list[torch.Tensor]) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = run(build_engine(load(checkpoint)), requests(params))
    for output, prompt, logprobs in zip(outputs, PROMPTS, reference, strict=True):
        check_prompt_logprobs(output, prompt, logprobs, 0)
        assert output.token_ids == ()


def test_long_prompt_is_scored_in_pieces(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    whole = run(build_engine(load(checkpoint), Sizes(max_num_batched_tokens=300)), requests(params))
    monkeypatch.setattr("replicas.model.runner._MAX_SCORED_TOKENS", 7)
    pieces = run(build_engine(load(checkpoint), Sizes(max_num_batched_tokens=300)), requests(params))
    for one, other in zip(whole, pieces, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.chosen.token_id for entry in one.prompt_logprobs] == [
            entry.chosen.token_id for entry in other.prompt_logprobs
        ]


def test_sequence_whose_logits_are_not_numbers_fails_alone(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[9] = torch.nan
    engine = build_engine(loaded)
    good = (5, 6, 7)
    for params in (SamplingParams(max_tokens=4, temperature=0.0), SamplingParams(max_tokens=4, prompt_logprobs=1)):
        expected = run(engine, [GenerateRequest("good", good, params)])[0]
        outputs = run(engine, [GenerateRequest("bad", (5, 9, 7), params), GenerateRequest("good", good, params)])
        assert outputs[0].error is not None and "not finite" in outputs[0].error.message
        assert outputs[1].token_ids == expected.token_ids


def test_blocks_of_a_failed_sequence_do_not_harm_their_next_owner(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    good = GenerateRequest("good", (5, 6, 7), params)
    expected = run(build_engine(loaded), [good])[0]
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[9] = torch.nan
    engine = build_engine(loaded, Sizes(num_blocks=3))
    for _ in range(5):
        assert run(engine, [GenerateRequest("bad", (9,) * 47, SamplingParams(max_tokens=1))])[0].error is not None
        assert run(engine, [good])[0].token_ids == expected.token_ids
