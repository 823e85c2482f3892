"""A sequence whose numbers go wrong harms nobody else, not even through the blocks it leaves."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import Sizes, build_engine, load, random_prompts, reference_model, reference_tokens, run
from testkit.model.tiny_checkpoints import write_checkpoint

POISON = 2  # No random prompt has this token.


def write_poisoned(path: Path) -> Path:
    """A checkpoint in which one token's embedding is not a number."""
    write_checkpoint(path, with_tokenizer=False)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_sequence_with_nan_fails_alone_and_its_blocks_can_be_reused(tmp_path: Path) -> None:
    path = write_poisoned(tmp_path)
    engine = build_engine(load(path), Sizes(num_blocks=12, max_num_seqs=4))
    prompts = random_prompts((9, 21, 35, 18, 50, 7), seed=8)
    expected = reference_tokens(reference_model(path), prompts, 12)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    for round_number in range(3):
        requests = [GenerateRequest(f"{round_number}-{i}", prompt, params) for i, prompt in enumerate(prompts)]
        poisoned = GenerateRequest(f"{round_number}-bad", (*prompts[2][:20], POISON, *prompts[2][:20]), params)
        outputs = run(engine, [poisoned, *requests])
        assert outputs[0].error is not None and "not finite" in str(outputs[0].error)
        assert [list(output.token_ids) for output in outputs[1:]] == expected
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
