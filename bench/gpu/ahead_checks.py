"""Check that CUDA graphs and async scheduling give the tokens of plain steps."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.gpu.check import Check
from bench.gpu.device_time import num_graphs
from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.model.build import build_runner
from replicas.model.loading.loader import LoadedModel
from replicas.model.loading.options import Device, RunnerOptions
from replicas.model.loading.tokenizer import make_decoder
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams
from testkit.model.engine_runs import load, random_prompts, run
from testkit.model.tiny_checkpoints import write_checkpoint

ARCHITECTURES = ("llama", "mistral-window", "gemma2-window", "gpt_oss-window", "qwen3_moe", "deepseek_v3")
_MAX_NUM_SEQS = 12
_PARAMS = (
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=32, seed=3),
    SamplingParams(max_tokens=36, top_p=0.9, top_k=50, seed=4, logprobs=2),
    SamplingParams(max_tokens=28, temperature=0.0, stop_token_ids=tuple(range(100, 140))),
)


def check_ahead(architecture: str, device: Device, *, compile_layers: bool = False) -> Check:
    """Compare sequences of every kind in float32: graphs and async scheduling against plain steps."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), architecture, with_tokenizer=False)
        loaded = load(path, device=device, compile_layers=compile_layers)
        plain, _ = _run(loaded, is_ahead=False)
        ahead, num_graphs = _run(loaded, is_ahead=True)
    num_different = sum(one != other for one, other in zip(plain, ahead, strict=True))
    layers = "with compiled layers, " if compile_layers else ""
    return Check(
        f"{architecture}, {layers}a step ahead and in graphs equals plain steps",
        num_different == 0 and (num_graphs > 0 or loaded.device.type != "cuda"),
        f"{num_different} of {len(plain)} sequences differ, {num_graphs} graphs",
    )


def _run(loaded: LoadedModel, *, is_ahead: bool) -> tuple[list[tuple[int, ...]], int]:
    """Return each sequence's tokens, and the number of captured graphs."""
    limits = EngineLimits(max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=70)
    options = RunnerOptions(kv_cache_bytes=2**22, gpu_memory_utilization=0.4, enforce_eager=not is_ahead)
    runner = build_runner(loaded, limits, options)
    config = EngineConfig(
        num_blocks=min(60, runner.num_blocks),  # so few that some are preempted
        max_model_len=200,
        block_size=runner.block_size,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        async_scheduling=is_ahead,
    )
    engine = Engine(
        config,
        runner,
        lambda request: make_decoder(loaded.tokenizer, request.prompt_token_ids),
        ReplicaIdentity("check", "check", 1),
    )
    prompts = random_prompts((5, 33, 60, 90, 17, 48, 71, 25, 9, 55, 40, 12, 66, 81))
    requests = [
        GenerateRequest(f"request-{number}", prompt, _PARAMS[number % len(_PARAMS)])
        for number, prompt in enumerate(prompts)
    ]
    return [output.token_ids for output in run(engine, requests)], num_graphs(runner)
