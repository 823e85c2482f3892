"""Padded decodes with the kernels that CUDA graphs hold give the tokens of plain steps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from replicas.model.attention.triton import TritonBackend
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import Sizes, build_engine, load, num_preemptions, random_prompts, run
from testkit.model.tiny_checkpoints import write_checkpoint
from tests.model.decode_graphs.test_steps_ahead import check_same

PARAMS = (
    SamplingParams(max_tokens=14, temperature=0.0),
    SamplingParams(max_tokens=12, top_p=0.9, seed=3, logprobs=1),
    SamplingParams(max_tokens=6, seed=6, stop_token_ids=tuple(range(40, 80)), min_tokens=2),
)
# Of blocks of 4, the prompts take 18, with one to grow for each, and the finished sequences 28.
TIGHT = Sizes(num_blocks=22, block_size=4, max_num_seqs=5)


@pytest.mark.parametrize(("architecture", "num_processors"), [("llama", 132), ("gpt_oss-window", 1)])
def test_tokens_are_those_of_plain_steps(tmp_path: Path, architecture: str, num_processors: int) -> None:
    loaded = load(write_checkpoint(tmp_path, architecture))
    requests = [
        GenerateRequest(f"request-{number}", prompt, PARAMS[number % len(PARAMS)])
        for number, prompt in enumerate(random_prompts((5, 18, 9, 30)))
    ]
    expected = run(build_engine(loaded), requests)
    backend = TritonBackend(num_processors)
    engine = build_engine(loaded, TIGHT, backend, backend.planned, is_ahead=True)
    check_same(run(engine, requests), expected)
    assert num_preemptions(engine) > 0
