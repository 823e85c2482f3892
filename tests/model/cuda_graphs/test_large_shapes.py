"""Steps with prompts, padded to each of the large sizes, give the tokens that they give unpadded."""

import random
from collections import Counter

import pytest

from replicas.engine.batch import ScheduledSequence
from replicas.model.cuda_graphs.graphs import largest_mixed, step_shapes
from replicas.model.cuda_graphs.padding import StepPadding, StepShape
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import Sizes, build_engine, load, random_prompts, run
from testkit.model.planned_gather import PlannedGather

ARCHITECTURES = ("llama", "gemma2-window", "gpt_oss-window", "qwen3_moe")
NUM_SEQS, MAX_TOKENS = 64, 2048
LARGE = [shape.num_tokens for shape in step_shapes(NUM_SEQS, MAX_TOKENS, largest_mixed(90)) if shape.num_tokens >= 640]


def mixed_requests(size: int, previous: int, rng: random.Random) -> list[GenerateRequest]:
    """Return requests whose first step has more tokens than the next smaller shape, and at most `size`."""
    left, lengths = rng.randint(previous + 1, size), list[int]()
    while left > 0:
        lengths.append(min(left, rng.choice((1, 7, 40, 100, 200))) if len(lengths) < NUM_SEQS - 1 else min(left, 240))
        left -= lengths[-1]
    params = SamplingParams(max_tokens=3, temperature=0.0)
    prompts = random_prompts(lengths[:NUM_SEQS], rng.randrange(2**31))
    return [GenerateRequest(f"request-{number}", prompt, params) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("architecture", "num_runs"),
    [("llama", 2), *(pytest.param(name, 10, marks=pytest.mark.deep) for name in ARCHITECTURES)],
)
def test_padded_steps_give_the_tokens_of_plain_ones(
    architecture: str, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, rng, used = load(cached_checkpoint(architecture, with_tokenizer=True)), random.Random(1), Counter[int]()
    choose = StepPadding.shape_of

    def noted(self: StepPadding, items: list[ScheduledSequence]) -> StepShape | None:
        shape = choose(self, items)
        if shape is not None and shape.num_chunks:
            used[shape.num_tokens] += 1
        return shape

    monkeypatch.setattr(StepPadding, "shape_of", noted)
    sizes = Sizes(num_blocks=1024, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=NUM_SEQS)
    plain = build_engine(loaded, sizes)
    padded = build_engine(loaded, sizes, planned=PlannedGather, is_ahead=True, max_mixed=MAX_TOKENS)
    for previous, size in zip((512, *LARGE), LARGE, strict=False):
        for _ in range(num_runs):
            requests = mixed_requests(size, previous, rng)
            expected = run(plain, requests)
            outputs = run(padded, requests)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert LARGE == [640, 768, 896, 1024, 1280, 1536, 1792, 2048] and all(used[size] >= num_runs for size in LARGE)
