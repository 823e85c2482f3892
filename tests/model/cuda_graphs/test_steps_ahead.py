"""A step ahead, and in padded batches of fixed sizes, real models give the tokens that they give in plain steps."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from bench.gpu.model_checks import check_ahead
from replicas.engine.batch import BatchColumns
from replicas.engine.config import EngineLimits
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.inputs import dummy_item
from replicas.model.cuda_graphs.graphs import GraphRunner, PlannedAttention, bucket_sizes, largest_mixed, step_shapes
from replicas.model.cuda_graphs.padding import StepPadding, StepShape
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import ModelOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.model_replica import Backend, _engine_config
from replicas.options import ReplicaOptions
from replicas.protocol import Auto, FinishReason, GenerateRequest, LogitBias, SamplingParams, TokenDelta, merge
from testkit.engine.scripted_constraint import ScriptedConstraint
from testkit.engine.timed_runner import StepTimes, TimedRunner
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import Sizes, build_engine, load, num_preemptions, random_prompts, run
from testkit.model.planned_gather import PlannedGather

pytestmark = pytest.mark.rotated

ARCHITECTURES = ("llama", "mistral-window", "gemma2-window", "gpt_oss-window", "qwen3_moe", "deepseek_v3", "gpt2")
ROOMY, TIGHT = Sizes(), Sizes(num_blocks=54, block_size=4)
PARAMS = (
    SamplingParams(max_tokens=16, temperature=0.0),
    SamplingParams(max_tokens=14, top_p=0.9, seed=3),
    SamplingParams(max_tokens=16, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=12, temperature=1.3, top_k=40, min_p=0.01, seed=5, logprobs=1),
    SamplingParams(max_tokens=15, seed=6, logit_bias=(LogitBias(9, 4.0), LogitBias(20, -100.0))),
    SamplingParams(max_tokens=13, temperature=0.0, prompt_logprobs=2, logprobs=0),
    SamplingParams(max_tokens=16, temperature=0.8, seed=8, stop=("e", "th"), min_tokens=3),
    SamplingParams(max_tokens=20, seed=9, stop_token_ids=tuple(range(40, 80)), min_tokens=2),
)
PROMPTS = random_prompts((5, 33, 60, 41, 17, 25, 9, 48))
LOOKING_BACK = SamplingParams(max_tokens=12, seed=7, repetition_penalty=1.3, frequency_penalty=0.4)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load(cached_checkpoint(request.param, with_tokenizer=True))


def requests_with(params: tuple[SamplingParams, ...] = PARAMS) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"request-{number}", prompt, params[number % len(params)])
        for number, prompt in enumerate(PROMPTS)
    ]


def check_same(outputs: list[TokenDelta], expected: list[TokenDelta]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        found, wanted = (
            (some.error, some.token_ids, some.text, some.finish_reason, some.stop_reason) for some in (output, other)
        )
        assert found == wanted and output.error is None
        one_scores, two_scores = ((*some.logprobs, *some.prompt_logprobs) for some in (output, other))
        assert (len(output.logprobs), len(one_scores)) == (len(other.logprobs), len(two_scores))
        for one, two in zip(one_scores, two_scores, strict=True):
            assert (one.chosen.token_id, len(one.top)) == (two.chosen.token_id, len(two.top))
            assert one.chosen.logprob == pytest.approx(two.chosen.logprob, abs=1e-3)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("planned", [None, PlannedGather], ids=["eager", "padded"])
@pytest.mark.parametrize("sizes", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_tokens_are_those_of_plain_steps(loaded: LoadedModel, sizes: Sizes, planned: PlannedAttention | None) -> None:
    expected = run(build_engine(loaded, ROOMY), requests_with())
    assert len({token for output in expected for token in output.token_ids}) >= 20
    engine = build_engine(loaded, sizes, planned=planned, is_ahead=True)
    for _ in range(2):  # The second time with prefix hits.
        check_same(run(engine, requests_with()), expected)
    assert (num_preemptions(engine) > 0) == (sizes is TIGHT)


@pytest.mark.sampled(3)
def test_sequences_that_look_back_are_served_beside_the_others(loaded: LoadedModel) -> None:
    check_looking_back(loaded, counts_on_device=False)


def test_counts_on_the_device_serve_sequences_that_look_back() -> None:
    check_looking_back(load(cached_checkpoint("llama", with_tokenizer=True)), counts_on_device=True)


def check_looking_back(loaded: LoadedModel, *, counts_on_device: bool) -> None:
    requests = requests_with((*PARAMS[:3], LOOKING_BACK))
    expected = run(build_engine(loaded), requests)
    engine = build_engine(loaded, TIGHT, planned=PlannedGather, is_ahead=True, counts_on_device=counts_on_device)
    check_same(run(engine, requests), expected)


@pytest.mark.sampled(3)
def test_constrained_sequences_are_served_beside_the_others(loaded: LoadedModel) -> None:
    constrained = (
        SamplingParams(max_tokens=14, seed=3, grammar="9 30"),
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, grammar="3 6"),
        SamplingParams(max_tokens=12, seed=5, top_k=4, allowed_token_ids=(9, 70, 71, 72), bad_words=((70,), (71, 72))),
    )
    requests = requests_with((*constrained, *PARAMS[:2]))
    expected = run(build_engine(loaded), requests)
    for request, output in zip(requests, expected, strict=True):
        if request.params.grammar is not None:
            constraint = ScriptedConstraint(request.params.grammar)
            for token_id in output.token_ids:
                constraint.accept(token_id)  # raises if the token is not allowed
            is_short = len(output.token_ids) < request.params.max_tokens
            assert constraint.is_complete == is_short == (output.finish_reason is FinishReason.STOP)
        if request.params.allowed_token_ids:
            assert {9, 71, 72}.issuperset(output.token_ids)
            assert (71, 72) not in itertools.pairwise(output.token_ids)
    check_same(run(build_engine(loaded, TIGHT, planned=PlannedGather, is_ahead=True), requests), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
def test_aborts_and_late_arrivals_leave_other_tokens_unchanged(loaded: LoadedModel, seed: int) -> None:
    rng = random.Random(seed)
    requests = requests_with() + [
        replace(request, request_id=f"late-{number}") for number, request in enumerate(requests_with())
    ]
    expected = {output.request_id: output for output in run(build_engine(loaded), requests)}
    engine = build_engine(
        loaded, Sizes(num_blocks=60, block_size=4, max_num_seqs=5), planned=PlannedGather, is_ahead=True
    )
    outputs: dict[str, TokenDelta] = {}
    waiting, aborted = list(requests), set()
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0))
        if rng.random() < 0.05:
            aborted.add(rng.choice(requests).request_id)
            for request_id in aborted:
                engine.abort(request_id)
        for delta in engine.step():
            earlier = outputs.get(delta.request_id)
            outputs[delta.request_id] = delta if earlier is None else merge([earlier, delta])
        engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    whole = [request.request_id for request in requests if request.request_id not in aborted]
    check_same([outputs[name] for name in whole], [expected[name] for name in whole])


def test_all_shapes_keep_their_logits_in_one_buffer() -> None:
    loaded = load(cached_checkpoint("llama"))
    cache = KVCache(loaded.layers, 8, 16, loaded.dtype, loaded.device)
    shapes = step_shapes(max_num_seqs=4, max_num_batched_tokens=20)
    graphs = GraphRunner(loaded, cache, PlannedGather, shapes)
    with torch.inference_mode():
        kept = [graphs._compute(shape).logits for shape in shapes]
    assert len({logits.untyped_storage().data_ptr() for logits in kept}) == 1
    assert kept[0].untyped_storage().nbytes() == 4 * loaded.vocab_size * loaded.dtype.itemsize


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 9, 32, 64, 100, 256, 1024])
def test_buckets_are_few_and_waste_at_most_a_fifth(max_num_seqs: int) -> None:
    sizes = bucket_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs and list(sizes) == sorted(set(sizes)) and len(sizes) <= 40
    for size, following in itertools.pairwise(sizes):
        assert following - size <= max(8, size / 4)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("limits", [(1, 1), (1, 2), (8, 20), (256, 700), (256, 2048), (1024, 8192), (1024, 512)])
def test_shapes_of_steps_with_prompts_are_few_and_hold_what_they_should(
    limits: tuple[int, int], capability: int
) -> None:
    max_num_seqs, max_num_batched_tokens = limits
    largest = {80: 512, 90: 2048}[capability]
    mixed = [shape for shape in step_shapes(*limits, largest_mixed(capability)) if shape.num_chunks > 0]
    sizes = [shape.num_tokens for shape in mixed]
    assert len(sizes) <= 19 and sizes == sorted(set(sizes))
    assert max(sizes, default=1) == min(max_num_batched_tokens, largest)
    for size, following in itertools.pairwise((8, *sizes)):
        assert following <= 2 * size
    for shape in mixed:
        assert shape.num_rows == min(shape.num_tokens, max_num_seqs) and shape.num_chunks >= min(
            shape.num_tokens // 2, max_num_seqs
        )


def test_small_steps_have_the_next_shape_and_large_ones_none() -> None:
    padding = StepPadding(step_shapes(max_num_seqs=4, max_num_batched_tokens=40), max_blocks=4)

    def shape_of(*chunks: tuple[int, int]) -> StepShape | None:
        return padding.shape_of(BatchColumns.of([dummy_item(start, end - start, 16) for start, end in chunks]))

    assert shape_of((5, 6), (9, 10), (3, 4)) == StepShape.decodes(4)
    assert shape_of((5, 6), (0, 9)) == StepShape.mixed(16, 4) and shape_of((0, 33)) == StepShape.mixed(40, 4)
    assert shape_of((5, 6), (0, 40)) is None and shape_of(*[(5, 6)] * 5) is None


def test_the_check_for_gpus_runs_on_the_cpu() -> None:
    check = check_ahead("llama", "cpu")
    assert check.passed and check.detail == "0 of 14 sequences differ, 0 graphs"


def backend_on(device: str) -> Backend:
    return Backend(TimedRunner(StepTimes(0.0, 0.0, 0.0), 512, 2), lambda _: SilentDecoder(), 64, 256, 512,
                   frozenset(), "float32", device)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "asked", "is_ahead"),
    [("cpu", None, False), ("cuda:0", None, True), ("cpu", True, True), ("cuda:0", False, False)],
)
def test_async_scheduling_is_the_default_on_gpus_only(device: str, asked: bool | None, is_ahead: bool) -> None:
    options = ReplicaOptions(ModelOptions("m"), limits=EngineLimits(async_scheduling=asked))
    assert _engine_config(options, backend_on(device)).async_scheduling is is_ahead


@pytest.mark.parametrize(("device", "auto_s"), [("cpu", 0.0), ("cuda:0", 0.06)])
def test_an_automatic_tpot_target_is_that_of_the_device(device: str, auto_s: float) -> None:
    options = ReplicaOptions(ModelOptions("m"), limits=EngineLimits(tpot_targets_s=(Auto.AUTO, 0.25, None)))
    assert _engine_config(options, backend_on(device)).tpot_targets_s == (auto_s, 0.25, None)
