"""Runs of the real engine over a loaded model, without a thread or a server, and their references in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.engine.batch import BatchColumns, ItemResult, ModelRunner, ScheduledSequence
from replicas.engine.config import EngineConfig, EngineLimits, sequence_blocks
from replicas.engine.engine import Engine
from replicas.engine.sequence import Sequence
from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import ATTENTION_NAME, AttentionBackend, AttentionPort, register_attention
from replicas.model.attention.kv_cache import LayerGroup
from replicas.model.attention.layer_groups import grouped_cache
from replicas.model.attention.probe import probe_attention
from replicas.model.attention.select import choose_attention
from replicas.model.attention.state_cache import StateCache
from replicas.model.attention.state_select import choose_states
from replicas.model.batch.inputs import NO_LAST_ROWS
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.cuda_graphs.graphs import SMALL_MIXED, GraphRunner, PlannedAttention, step_shapes
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import Device, Dtype, ModelOptions, Quantization
from replicas.model.loading.tokenizer import make_decoder
from replicas.model.pooling.heads import PoolHead
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.sampler import Sampler, SamplingPlanner
from replicas.model.sampling.token_counts import CountSlots, TokenCounts, penalize_by_definition
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams, TokenDelta, merge
from testkit.engine.scripted_constraint import ScriptedCompiler
from testkit.model.planned_states import PlannedTorchStates
from testkit.model.tiny_checkpoints import VOCAB_SIZE, tiny_config

MAX_MODEL_LEN = 256
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Engine limits that tests vary."""

    num_blocks: int = 64
    max_num_batched_tokens: int = 70
    max_num_seqs: int = 8
    block_size: int = 16
    gives_back: bool = False
    """Blocks behind a window are given back. A block then belongs to one group of layers."""
    num_state_slots: int = 24
    """Slots for recurrent state, if the model has any."""


def load(
    path: Path, dtype: Dtype = "float32", device: Device = "cpu", *, compile_layers: bool = False,
    quantization: Quantization = "none",
) -> LoadedModel:  # fmt: skip
    """Load a checkpoint without the C++ kernels."""
    options = ModelOptions(
        str(path), dtype=dtype, device=device, max_model_len=MAX_MODEL_LEN, kernel_cache_dir=None,
        compile_layers=compile_layers, quantization=quantization,
    )  # fmt: skip
    return load_model(options)


def load_compiled(
    path: Path, dtype: Dtype = "float32", quantization: Quantization = "none", max_model_len: int = MAX_MODEL_LEN
) -> LoadedModel:
    """Load a checkpoint with the C++ kernels, which must be available, and check that its attention uses them."""
    options = ModelOptions(str(path), dtype=dtype, device="cpu", max_model_len=max_model_len, quantization=quantization)
    loaded = load_model(options)
    assert choose_attention(loaded.attention_spec(16), "auto") is CppAttention
    return loaded


def load_unoptimized(path: Path) -> LoadedModel:
    """Load a checkpoint in float32 with transformers' own layers, as `load_model` has them before it optimizes."""
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()
    port = AttentionPort(model)
    return replace(load(path), model=model, port=port, layers=probe_attention(model, port))


def random_model(architecture: str) -> PreTrainedModel:
    """Return a tiny model of one of `ARCHITECTURES` with random weights, whose attention Headway computes."""
    register_attention()
    return AutoModelForCausalLM.from_config(tiny_config(architecture), attn_implementation=ATTENTION_NAME).eval()


def build_engine(
    loaded: LoadedModel,
    sizes: Sizes | None = None,
    attention: AttentionBackend = GatherAttention,
    planned: PlannedAttention | None = None,
    *,
    is_ahead: bool = False,
    counts_on_device: bool = False,
    cache_dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    max_mixed: int = SMALL_MIXED,
) -> Engine:
    """Return an engine over `make_runner`'s runner, with async scheduling if `is_ahead`.

    `vocab_size` is the number of tokens that the engine accepts; None: the model's.
    """
    sizes = sizes or Sizes()
    runner = make_runner(
        loaded, sizes, attention, planned,
        counts_on_device=counts_on_device, cache_dtype=cache_dtype, max_mixed=max_mixed,
    )  # fmt: skip
    return engine_over(runner, loaded, sizes, is_ahead=is_ahead, vocab_size=vocab_size)


def make_runner(
    loaded: LoadedModel,
    sizes: Sizes,
    attention: AttentionBackend = GatherAttention,
    planned: PlannedAttention | None = None,
    *,
    counts_on_device: bool = False,
    cache_dtype: torch.dtype | None = None,
    max_mixed: int = SMALL_MIXED,
) -> TorchModelRunner:
    """Return a runner; given `planned` attention, small steps have fixed sizes.

    If `counts_on_device`, penalties apply as on a GPU. `cache_dtype` is that of the KV cache. `max_mixed` is the number
    of tokens of the largest padded step with prompts.
    """
    dtype = cache_dtype or loaded.dtype
    groups = loaded.layer_groups(dtype) if sizes.gives_back else (LayerGroup(loaded.layers, None),)
    cache = grouped_cache(groups, sizes.num_blocks, sizes.block_size, dtype, loaded.device)
    if loaded.state_layers:
        cache.states = StateCache(
            loaded.state_layers, sizes.num_state_slots, sizes.block_size, loaded.dtype, loaded.device
        )
    has_states = bool(loaded.state_layers)
    if has_states and planned is None:
        loaded.port.recurrent.backend = choose_states(loaded.state_spec(sizes.block_size))
    elif has_states:
        loaded.port.recurrent.backend = PlannedTorchStates()
    shapes = step_shapes(sizes.max_num_seqs, sizes.max_num_batched_tokens, max_mixed, has_states=has_states)
    graphs = None if planned is None else GraphRunner(loaded, cache, planned, shapes)
    counts = None
    if counts_on_device:
        counts = TokenCounts(sizes.max_num_seqs, loaded.vocab_size, loaded.device, penalize_by_definition)
    return TorchModelRunner(loaded, cache, attention, graphs, counts)


def engine_over(
    runner: TorchModelRunner,
    loaded: LoadedModel,
    sizes: Sizes,
    *,
    is_ahead: bool = False,
    vocab_size: int | None = None,
    launcher: ModelRunner | None = None,
) -> Engine:
    """Return an engine over `runner`; see `build_engine`. Its steps are launched by `launcher`; None: by the runner."""
    limits = EngineLimits(sizes.block_size, sizes.max_num_seqs, sizes.max_num_batched_tokens)
    blocks = sequence_blocks(limits, runner.windows, is_asynchronous=is_ahead)
    config = EngineConfig(
        num_blocks=sizes.num_blocks,
        num_state_slots=runner.num_state_slots,
        windows=runner.windows,
        max_model_len=min(loaded.max_model_len, blocks.num_tokens(sizes.num_blocks)),
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        vocab_size=vocab_size or loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        async_scheduling=is_ahead,
        counts_on_device=runner.counts_tokens,
        whole_prompts=loaded.is_two_sided,
        enable_prefix_caching=not loaded.is_two_sided,
    )
    return Engine(
        config,
        launcher or runner,
        lambda request: make_decoder(loaded.tokenizer, request.prompt_token_ids),
        ReplicaIdentity("replica", "node", 1),
    )


def run(engine: Engine, requests: Iterable[GenerateRequest], head: PoolHead | None = None) -> list[TokenDelta]:
    """Return each request's whole output as one delta, in order of the requests; `head` pools those that ask for it."""
    requests = list(requests)
    for request in requests:
        constraint = ScriptedCompiler().constraint_of(request) if request.params.is_constrained else None
        pool = request.params.pool
        pooler = None if pool is None or head is None else head.pooler(pool, len(request.prompt_token_ids))
        engine.add(request, constraint, pooler)
    outputs: dict[str, TokenDelta] = {}
    while engine.has_work:
        for delta in engine.step():
            earlier = outputs.get(delta.request_id)
            outputs[delta.request_id] = delta if earlier is None else merge([earlier, delta])
        engine.check_invariants()
    return [outputs[request.request_id] for request in requests]


def requests_for(prompts: Iterable[Prompt], params: SamplingParams) -> list[GenerateRequest]:
    return [GenerateRequest(f"request-{i}", prompt, params) for i, prompt in enumerate(prompts)]


def tokens(engine: Engine, prompts: Iterable[Prompt], params: SamplingParams) -> list[list[int]]:
    """Return the output token ids of each prompt, all added at once."""
    outputs = run(engine, requests_for(prompts, params))
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [list(output.token_ids) for output in outputs]


def log_probabilities(output: TokenDelta) -> torch.Tensor:
    """Return the log probabilities [vocab_size] at the first output token of a request that asked for all of them."""
    found = torch.full((len(output.logprobs[0].top),), torch.nan)
    for entry in output.logprobs[0].top:
        found[entry.token_id] = entry.logprob
    return found


def check_equals_generate(engine: Engine, path: Path, prompts: list[Prompt], max_tokens: int) -> None:
    """Check that the engine's greedy output is that of `generate()` for the checkpoint in `path`."""
    outputs = tokens(engine, prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    expected = reference_tokens(reference_model(path), prompts, max_tokens)
    assert outputs == expected, f"{outputs} instead of {expected}"


def sample(
    logits: torch.Tensor, sequences: Iterable[Sequence], eos_token_ids: frozenset[int] = frozenset()
) -> list[ItemResult]:
    """Return the next token of each sequence from its row of logits, with the log probabilities it asks for."""
    return sampling_of(logits.shape[1], eos_token_ids)(logits, sequences)


def sampling_of(
    vocab_size: int, eos_token_ids: frozenset[int] = frozenset(), counts: TokenCounts | None = None
) -> Callable[[torch.Tensor, Iterable[Sequence]], list[ItemResult]]:
    """Return a function that samples the next token of each sequence from its row of logits.

    Penalties apply by `counts` on the device; None: by the tokens on the host.
    """
    slots = None if counts is None else CountSlots(*counts.table.shape)
    planner, sampler = SamplingPlanner(eos_token_ids, vocab_size, slots), Sampler(counts)

    def choose(logits: torch.Tensor, sequences: Iterable[Sequence]) -> list[ItemResult]:
        columns = BatchColumns.of(
            [ScheduledSequence.of(sequence, 0, len(sequence.token_ids)) for sequence in sequences]
        )
        to_device, to_host = HostToDeviceBuffer(), DeviceToHostBuffer()
        plan = planner.plan(columns, NO_LAST_ROWS, to_device)
        on_device = DeviceBuffer.of(to_device.words, no_tokens(logits.device))
        launched = sampler.launch(plan, logits, None, on_device, to_host)
        to_host.close(logits.device)
        to_host.wait()
        return list(launched.read(to_host, columns))

    return choose


def num_preemptions(engine: Engine) -> int:
    return int(next(m.value for m in engine.metrics().metrics if m.name == "vllm:num_preemptions"))


def random_prompts(lengths: Iterable[int], seed: int = 1) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in lengths]


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
