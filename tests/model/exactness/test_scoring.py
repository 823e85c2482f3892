"""Log probabilities of prompt tokens equal a plain forward pass, however the prompt is cut up."""

import pytest
import torch

from replicas.protocol import SamplingParams, TokenDelta
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import Sizes, build_engine, load, random_prompts, reference_model, requests_for, run

PROMPTS = random_prompts((1, 2, 40, 180))


@pytest.fixture(scope="module")
def reference() -> list[torch.Tensor]:
    """Log probabilities [num_tokens, vocab_size] of each prompt."""
    model = reference_model(cached_checkpoint("llama"))
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


def check_prompt_logprobs(output: TokenDelta, prompt: tuple[int, ...], reference: torch.Tensor, num_top: int) -> None:
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for position, logprobs in enumerate(output.prompt_logprobs):
        assert logprobs.chosen.token_id == prompt[position + 1]
        assert logprobs.chosen.logprob == pytest.approx(float(reference[position, prompt[position + 1]]), abs=1e-4)
        best = reference[position].topk(num_top)
        assert [entry.token_id for entry in logprobs.top] == best.indices.tolist()
        assert [entry.logprob for entry in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("sizes", [Sizes(max_num_batched_tokens=300), Sizes(), Sizes(num_blocks=56, block_size=4)])
def test_prompt_logprobs_equal_a_plain_forward(reference: list[torch.Tensor], sizes: Sizes) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=3, logprobs=2)
    plain = SamplingParams(max_tokens=12, temperature=0.0)
    engine = build_engine(load(cached_checkpoint("llama")), sizes)
    expected = run(engine, requests_for(PROMPTS, plain))
    for output, prompt, logprobs, other in zip(
        run(engine, requests_for(PROMPTS, params)), PROMPTS, reference, expected, strict=True
    ):
        check_prompt_logprobs(output, prompt, logprobs, 3)
        assert output.token_ids == other.token_ids
        assert len(output.logprobs) == 12
        assert output.logprobs[0].chosen.logprob == pytest.approx(float(logprobs[-1].max()), abs=1e-4)


def test_prompt_is_scored_without_generating(reference: list[torch.Tensor]) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = run(build_engine(load(cached_checkpoint("llama"))), requests_for(PROMPTS, params))
    for output, prompt, logprobs in zip(outputs, PROMPTS, reference, strict=True):
        check_prompt_logprobs(output, prompt, logprobs, 0)
        assert output.token_ids == ()


def test_long_prompt_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    whole = run(
        build_engine(load(cached_checkpoint("llama")), Sizes(max_num_batched_tokens=300)), requests_for(PROMPTS, params)
    )
    monkeypatch.setattr("replicas.model.planner._MAX_SCORED_TOKENS", 7)
    pieces = run(
        build_engine(load(cached_checkpoint("llama")), Sizes(max_num_batched_tokens=300)), requests_for(PROMPTS, params)
    )
    for one, other in zip(whole, pieces, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.chosen.token_id for entry in one.prompt_logprobs] == [
            entry.chosen.token_id for entry in other.prompt_logprobs
        ]
