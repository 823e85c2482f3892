"""Asynchronous steps and graphs on a device that runs late: nothing is overwritten before its reader has run."""

import asyncio
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.model import build
from replicas.model.attention import state_triton, triton
from replicas.model.attention.layer_groups import bytes_of_block, num_cache_tensors
from replicas.model.attention.plan import StatePlan
from replicas.model.attention.state_cache import LayerStates, bytes_per_slot
from replicas.model.attention.state_triton import TritonStateBackend
from replicas.model.attention.triton import TritonBackend
from replicas.model.batch.inputs import dummy_item
from replicas.model.batch.transfers import DeviceToHostBuffer, begin_copy
from replicas.model.build import build_runner, warm_up
from replicas.model.hardware.device_memory import MemoryUse
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling import logprobs, sampler
from replicas.model.sampling.token_counts import TokenCounts, penalize_by_definition
from replicas.model_replica import Backend, ModelReplica
from replicas.options import ReplicaOptions
from replicas.protocol import GenerateRequest, LogitBias, ReplicaIdentity, SamplingParams, TokenDelta, merge
from testkit.engine.scripted_constraint import ScriptedCompiler
from testkit.engine.single_stream import generate
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import build_engine, load_unoptimized, random_prompts, run
from testkit.model.paged_cases import attend_by_definition
from testkit.model.planned_states import PlannedTorchStates
from testkit.model.recorded_gpu import DEVICE, DeviceTensor, HazardError, RecordedGpu, WaitError
from tests.model.cuda_graphs.test_steps_ahead import check_same

pytestmark = pytest.mark.rotated

PARAMS = (
    SamplingParams(max_tokens=16, temperature=0.0),
    SamplingParams(max_tokens=23, top_p=0.9, seed=3),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=30, seed=6, logit_bias=(LogitBias(9, 4.0), LogitBias(20, -100.0))),
    SamplingParams(max_tokens=13, temperature=0.0, prompt_logprobs=2),
    SamplingParams(max_tokens=14, seed=3, grammar="9 30"),
    SamplingParams(max_tokens=12, seed=7, repetition_penalty=1.3, frequency_penalty=0.4),
)


def write_late(layer: Any, shape: Any, slots: DeviceTensor, call: Any) -> None:
    key, value, where = call.key.memory, call.value.memory, slots.memory
    keys, values = layer.keys.memory, layer.values.memory

    def run() -> None:
        keys.flatten(0, 1)[where], values.flatten(0, 1)[where] = key, value

    slots.gpu.launch("write", run, [key, value, where], [keys, values])


def attend_late(launch: Any, parts: Any) -> None:
    query, keys, values, output, pieces, tables = (
        some.memory
        for some in (launch.call.query, launch.layer.keys, launch.layer.values, launch.output, launch.work.pieces,
                     launch.group.tables)
    )  # fmt: skip

    def run() -> None:
        for row, position, count, table_row in pieces[:, :4].tolist():
            end, rows = position + count, slice(row, row + count)
            if count > 0 and table_row < 0:
                output[rows] = 0.0
            elif count > 0:
                blocks = tables[table_row, : -(-end // keys.shape[1])].long()
                seen = (part[blocks].flatten(0, 1)[:end] for part in (keys, values))
                output[rows] = attend_by_definition(query[rows], *seen, launch.call.scoring, launch.call.window)

    launch.group.tables.gpu.launch("attend", run, [query, keys, values, pieces, tables], [output])


def plan_late(work: Any, group: Any, tile: Any, window: Any) -> None:
    """Copy the chunks: each is a piece."""
    chunks, pieces = group.chunks.memory, work.pieces.memory

    def run() -> None:
        pieces[:, 2] = 0
        pieces[: len(chunks), :4] = chunks

    group.chunks.gpu.launch("plan", run, [chunks], [pieces])


@dataclass
class LateCache:
    """Cache of one layer, whose tensors are those of the device's memory."""

    layer: LayerStates
    block_size: int
    device = torch.device("cpu")

    def __getitem__(self, _: int) -> LayerStates:
        return self.layer


def states_late(layer: Any, plan: StatePlan, call: Any, output: Any, method: str) -> None:
    """Launch a recurrent layer's convolution or rule by definition."""
    kept = [getattr(layer, name).memory for name in ("inputs", "states", "keys", "updates", "decays")]
    given = {name: part.memory for name in type(call).__slots__ if isinstance(part := getattr(call, name), Tensor)}
    chunks, result = plan.chunks.memory, output.memory

    def run() -> None:
        cache: Any = LateCache(LayerStates(*kept), kept[2].shape[2])
        states = PlannedTorchStates().planned(cache, replace(plan, chunks=chunks))
        result.copy_(getattr(states, method)(replace(call, **given)))

    plan.chunks.gpu.launch(method, run, [chunks, *given.values(), *kept], [*kept, result])  # type: ignore[attr-defined]


def convolve_late(layer: Any, plan: StatePlan, chunk_of_row: Any, call: Any, output: Any) -> None:
    states_late(layer, plan, call, output, "convolve")


def advance_late(layer: Any, plan: StatePlan, num_decodes: int, call: Any, output: Any) -> None:
    states_late(layer, plan, call, output, "advance")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> RecordedGpu:
    """Return a recorded GPU in place of CUDA, with kernels by definition in place of Triton's."""
    recorded = RecordedGpu()
    for name, value in recorded.replacements().items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(triton, "write_keys_and_values", write_late)
    monkeypatch.setattr(triton, "_plan", plan_late)
    monkeypatch.setattr(triton, "_attend", attend_late)
    monkeypatch.setattr(triton, "_combine", lambda *_: None)
    monkeypatch.setattr(state_triton, "assign_rows", lambda *_: None)
    monkeypatch.setattr(state_triton, "convolve", convolve_late)
    monkeypatch.setattr(state_triton, "advance", advance_late)
    monkeypatch.setattr(build, "choose_states", lambda spec, _: TritonStateBackend() if spec.layers else None)
    for module in (build, sampler):
        monkeypatch.setattr(module, "has_draw_kernel", lambda _: False)
    monkeypatch.setattr(logprobs, "has_score_kernel", lambda _: False)
    monkeypatch.setattr(build, "choose_attention", lambda *_: TritonBackend(132, 90))
    monkeypatch.setattr(build, "token_counts", lambda *sizes: TokenCounts(*sizes[:3], penalize_by_definition))
    return recorded


def load(architecture: str = "llama") -> LoadedModel:
    return load_unoptimized(cached_checkpoint(architecture, with_tokenizer=False))


def build_on(gpu: RecordedGpu, loaded: LoadedModel, limits: EngineLimits) -> TorchModelRunner:
    """Move a model to the recorded device, and build its runner with graphs and a cache of 40 blocks for each table."""
    for module in loaded.model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else gpu.to_device(tensor)
    groups = loaded.layer_groups(loaded.dtype)
    block_bytes, num_tensors = (
        bytes_of_block(groups, limits.block_size, loaded.dtype), num_cache_tensors(groups, loaded.dtype)
    )  # fmt: skip
    slot_bytes = bytes_per_slot(loaded.state_layers, limits.block_size, loaded.dtype)
    num_slots = 4 * limits.max_num_seqs + 1  # At most half of the memory is for them.
    num_blocks = 40 * len(groups)
    gpu.total_bytes = num_tensors * 2**21 + 2 * num_slots * slot_bytes + (num_blocks + 1) * block_bytes
    with gpu:
        runner = build_runner(replace(loaded, device=DEVICE), limits, RunnerOptions(gpu_memory_utilization=1.0))
        warm_up(runner, limits)
    assert runner.num_blocks == num_blocks or runner.num_state_slots == num_slots - 1
    assert runner._graphs is not None
    return runner


def engine_of(runner: TorchModelRunner, limits: EngineLimits) -> Engine:
    config = EngineConfig(
        num_blocks=runner.num_blocks, max_model_len=runner.max_model_len, num_state_slots=runner.num_state_slots,
        windows=runner.windows,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=runner.vocab_size, eos_token_ids=frozenset(), async_scheduling=True,
        counts_on_device=runner.counts_tokens,
    )  # fmt: skip
    return Engine(config, runner, lambda _: SilentDecoder(), ReplicaIdentity("replica", "node", 1))


def steps_at_random(engine: Engine, num_steps: int) -> dict[GenerateRequest, TokenDelta]:
    """Run steps with requests that come, and are aborted, at random; return the outputs of whole requests."""
    rng = random.Random(7)
    requests: dict[str, GenerateRequest] = {}
    outputs: dict[str, TokenDelta] = {}
    aborted: set[str] = set()
    for step in itertools.count():
        if step >= num_steps and not engine.has_work:
            break
        while step < num_steps and (rng.random() < 0.25 or not engine.has_work):
            (prompt,) = random_prompts([rng.choice([3, 5, 17, 33, 60])], seed=len(requests))
            request = GenerateRequest(f"{len(requests)}", prompt, rng.choice(PARAMS))
            requests[request.request_id] = request
            engine.add(request, ScriptedCompiler().constraint_of(request) if request.params.is_constrained else None)
        if rng.random() < 0.03 and requests:
            aborted.add(rng.choice(list(requests)))
            for name in aborted:
                engine.abort(name)
        for delta in engine.step():
            earlier = outputs.get(delta.request_id)
            outputs[delta.request_id] = delta if earlier is None else merge([earlier, delta])
        engine.check_invariants()
    return {requests[name]: output for name, output in outputs.items() if name not in aborted}


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def check_random_steps(gpu: RecordedGpu, limits: EngineLimits, num_steps: int, min_changes: int) -> None:
    loaded, plain = load(), load()
    runner = in_thread(lambda: build_on(gpu, loaded, limits))
    gpu.replays.clear()
    warm = set(gpu.names)
    gpu.replacements()["set_sync_debug_mode"]("error")
    with gpu:
        outputs = steps_at_random(engine_of(runner, limits), num_steps)
    assert gpu.names == warm, "a request is the first to run an operation"
    expected = run(build_engine(plain), outputs)
    check_same([output._replace(text="") for output in outputs.values()], [one._replace(text="") for one in expected])
    assert runner._graphs is not None
    shapes = {id(captured.graph): shape for shape, captured in runner._graphs._graphs.items()}
    replayed = [shapes[id(graph)] for _, graph in gpu.replays]
    assert sum(one != other for one, other in itertools.pairwise(replayed)) >= min_changes
    assert {shape.num_chunks > 0 for shape in replayed} == {True, False}
    assert len({stream for _, stream in gpu.captures}) == 1


@pytest.mark.deep
def test_many_random_steps_with_graphs_of_another_thread(gpu: RecordedGpu) -> None:
    limits = EngineLimits(max_num_seqs=10, max_num_batched_tokens=48, block_size=8)
    check_random_steps(gpu, limits, num_steps=200, min_changes=20)


def check_few_steps(
    gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, plain: LoadedModel, num_steps: int
) -> TorchModelRunner:
    """Check the outputs of a small runner against those of `plain`, without the measurement of memory; return it."""
    monkeypatch.setattr(build, "_measure_on_cuda", lambda *_: MemoryUse(0, 0, 0, gpu.total_bytes))
    monkeypatch.setattr(build, "dummy_item", lambda start, num_tokens, size: dummy_item(3, min(num_tokens, 9), 8))
    limits = EngineLimits(max_num_seqs=2, max_num_batched_tokens=20, block_size=8)
    runner = in_thread(lambda: build_on(gpu, loaded, limits))
    gpu.replacements()["set_sync_debug_mode"]("error")
    with gpu:
        engine = engine_of(runner, limits)
        outputs = steps_at_random(engine, num_steps)
    expected = run(build_engine(plain), outputs)
    check_same([output._replace(text="") for output in outputs.values()], [one._replace(text="") for one in expected])
    assert gpu.replays and engine.stats().num_free_blocks == runner.num_blocks
    return runner


def test_the_state_of_recurrent_layers_is_in_order(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    check_few_steps(gpu, monkeypatch, load("olmo_hybrid"), load("olmo_hybrid"), num_steps=8)
    assert {"convolve", "advance"} <= gpu.names


def test_block_tables_of_several_groups_are_in_order(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = check_few_steps(gpu, monkeypatch, load("qwen2-window"), load("qwen2-window"), num_steps=20)
    assert runner.windows == (24, 24, None)


async def test_the_engines_thread_captures_and_replays(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement of memory, which takes seconds, is a part of the other tests."""
    monkeypatch.setattr(build, "_measure_on_cuda", lambda *_: MemoryUse(0, 0, 0, gpu.total_bytes))
    monkeypatch.setattr(build, "dummy_item", lambda *_: dummy_item(3, 1, 8))
    limits = EngineLimits(max_num_seqs=2, max_num_batched_tokens=48, block_size=8)
    loaded = load()

    def load_backend(_: ReplicaOptions) -> Backend:
        runner = build_on(gpu, loaded, limits)
        gpu.__enter__()  # For the steps of this thread.
        return Backend(
            runner, lambda _: SilentDecoder(), runner.num_blocks, runner.max_model_len, loaded.vocab_size,
            frozenset(), "float32", str(DEVICE),
        )  # fmt: skip

    replica = await asyncio.to_thread(
        ModelReplica, ReplicaOptions(ModelOptions("llama"), limits=limits), "replica", "node", load_backend
    )
    engine = replica.start()
    request = GenerateRequest("one", (5, 6, 7), SamplingParams(max_tokens=4, temperature=0.0))
    deltas = [delta async for delta in generate(engine, request)]
    await engine.stop()
    assert sum(len(delta.token_ids) for delta in deltas) == 4
    threads = {thread for thread, _ in gpu.captures} | {thread for thread, _ in gpu.replays}
    assert len(threads) == 1 and len(gpu.replays) >= 3


@pytest.mark.deep
def test_a_step_whose_results_are_not_waited_for_is_found(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceToHostBuffer, "wait", lambda _: None)
    limits = EngineLimits(max_num_seqs=2, max_num_batched_tokens=48, block_size=8)
    with pytest.raises(AssertionError):
        check_random_steps(gpu, limits, num_steps=12, min_changes=0)


def test_the_recorder_finds_missing_order(gpu: RecordedGpu) -> None:
    side = gpu.new_stream()
    with gpu, torch.inference_mode():
        numbers = begin_copy(torch.arange(5), DEVICE)
        with gpu.on_stream(side), pytest.raises(HazardError):
            numbers.add_(1)
        side.wait_stream(gpu.current_stream())
        with gpu.on_stream(side):
            numbers.add_(1)
        gpu.current_stream().wait_stream(side)
        to_host = DeviceToHostBuffer()
        pending = to_host.add(numbers)
        with pytest.raises(HazardError):
            to_host[pending] + 1
        to_host.close(DEVICE)
        to_host.wait()
        assert to_host[pending].tolist() == [1, 2, 3, 4, 5]
        for wait in (lambda: numbers.sum().item(), lambda: torch.ones(3).to(DEVICE), lambda: numbers.cpu()):
            before = len(gpu.waits)
            wait()
            assert len(gpu.waits) == before + 1
            gpu.replacements()["set_sync_debug_mode"]("error")
            with pytest.raises(WaitError):
                wait()
            gpu.replacements()["set_sync_debug_mode"]("default")
