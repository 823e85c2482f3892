"""The real engine over a loaded model, run to completion without a thread or a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.engine.batch import ItemResult, ScheduledSequence
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.sequence import Sequence
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.transfers import DeviceToHostBuffer, HostToDeviceBuffer
from replicas.model.decode_graphs.graphs import DecodeGraphRunner, PlannedAttention, bucket_sizes
from replicas.model.loading.loader import LoadedModel, load_model
from replicas.model.loading.options import Device, Dtype, ModelOptions
from replicas.model.loading.tokenizer import make_decoder
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.sampler import Sampler
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams, TokenDelta, merge

MAX_MODEL_LEN = 256
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Engine limits that tests vary."""

    num_blocks: int = 64
    max_num_batched_tokens: int = 70
    max_num_seqs: int = 8
    block_size: int = 16


def load(path: Path, dtype: Dtype = "float32", device: Device = "cpu", *, compile_layers: bool = False) -> LoadedModel:
    """Load a checkpoint without the C++ kernels; tests/model/exactness/test_cpp.py covers those."""
    options = ModelOptions(
        str(path), dtype=dtype, device=device, max_model_len=MAX_MODEL_LEN, kernel_cache_dir=None,
        compile_layers=compile_layers,
    )  # fmt: skip
    return load_model(options)


def build_engine(
    loaded: LoadedModel,
    sizes: Sizes | None = None,
    attention: AttentionBackend = GatherAttention,
    planned: PlannedAttention | None = None,
    *,
    is_ahead: bool = False,
) -> Engine:
    """Return an engine, with async scheduling if `is_ahead`; given `planned` attention, it decodes in fixed buckets."""
    sizes = sizes or Sizes()
    cache = KVCache(loaded.layers, sizes.num_blocks, sizes.block_size, loaded.dtype, loaded.device)
    decodes = None if planned is None else DecodeGraphRunner(loaded, cache, planned, bucket_sizes(sizes.max_num_seqs))
    config = EngineConfig(
        num_blocks=sizes.num_blocks,
        max_model_len=min(loaded.max_model_len, sizes.num_blocks * sizes.block_size),
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        eos_token_ids=loaded.eos_token_ids,
        async_scheduling=is_ahead,
    )
    return Engine(
        config,
        TorchModelRunner(loaded, cache, attention, decodes),
        lambda request: make_decoder(loaded.tokenizer, request.prompt_token_ids),
        ReplicaIdentity("replica", "node", 1),
    )


def run(engine: Engine, requests: Iterable[GenerateRequest]) -> list[TokenDelta]:
    """Return each request's whole output as one delta, in order of the requests."""
    requests = list(requests)
    for request in requests:
        engine.add(request)
    outputs: dict[str, TokenDelta] = {}
    while engine.has_work:
        for delta in engine.step():
            earlier = outputs.get(delta.request_id)
            outputs[delta.request_id] = delta if earlier is None else merge([earlier, delta])
        engine.check_invariants()
    return [outputs[request.request_id] for request in requests]


def tokens(engine: Engine, prompts: Iterable[Prompt], params: SamplingParams) -> list[list[int]]:
    """Return the output token ids of each prompt, all added at once."""
    outputs = run(engine, [GenerateRequest(f"request-{i}", prompt, params) for i, prompt in enumerate(prompts)])
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [list(output.token_ids) for output in outputs]


def sample(sampler: Sampler, logits: torch.Tensor, sequences: Iterable[Sequence]) -> list[ItemResult]:
    """Return the next token of each sequence from its row of logits, with the log probabilities it asks for."""
    items = [ScheduledSequence(sequence, 0, len(sequence.token_ids)) for sequence in sequences]
    to_device, to_host = HostToDeviceBuffer(), DeviceToHostBuffer()
    plan = sampler.plan(items, logits.shape[1], to_device)
    launched = plan.launch(logits, None, to_device.send(logits.device), to_host)
    to_host.close(logits.device)
    to_host.wait()
    return launched.read(to_host)


def num_preemptions(engine: Engine) -> int:
    return int(next(m.value for m in engine.metrics().metrics if m.name == "vllm:num_preemptions"))


def random_prompts(lengths: Iterable[int], seed: int = 1, vocab_size: int = 512) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, vocab_size, (n,), generator=generator).tolist()) for n in lengths]


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the weights in transformers with eager attention: its fused one omits score caps in some versions."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def reference_tokens(model: PreTrainedModel, prompts: Iterable[Prompt], max_tokens: int) -> list[list[int]]:
    """Return the greedy output of `generate()` for each prompt alone."""
    outputs = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
