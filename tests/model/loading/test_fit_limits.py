"""Limits that nobody chose are lowered until the KV cache holds them, and the start says so."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from replicas.engine.config import LOWERED_LIMITS, EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.build import Room, describe_lowered, fit_limits
from replicas.model.loading.options import ModelOptions
from replicas.model_replica import Backend, ModelReplica, load_torch_backend
from replicas.options import ReplicaOptions, RunnerOptions
from testkit.model.cached_checkpoints import cached_checkpoint

GPU = EngineLimits(max_num_seqs=256, max_num_batched_tokens=2048, lowered=frozenset(LOWERED_LIMITS))
BLOCK = 1000


def room_of(num_bytes: int, asked: list[EngineLimits]) -> Callable[[EngineLimits], Room]:
    """Return the room of a device where a sequence takes 100 bytes beside the cache and a token of a step 10."""

    def room(limits: EngineLimits) -> Room:
        asked.append(limits)
        taken = 100 * limits.max_num_seqs + 10 * limits.max_num_batched_tokens
        return Room(num_bytes - taken, f"{num_bytes} bytes leave too little")

    return room


def test_a_large_cache_lowers_nothing() -> None:
    asked: list[EngineLimits] = []
    limits, num_blocks, _ = fit_limits(GPU, BLOCK, room_of(10_000_000, asked))
    assert limits == GPU and num_blocks == (10_000_000 - 25_600 - 20_480) // BLOCK - 1 and asked == [GPU]


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (46_080 + 401_000, (50, 2048)),  # 400 blocks are 6,400 tokens: 128 each for 50 sequences
        (46_080 + 101_000, (12, 1600)),
        (40_000, (1, 240)),  # Steps of the defaults do not even fit.
    ],
)
def test_a_small_cache_lowers_the_limits(num_bytes: int, expected: tuple[int, int]) -> None:
    asked: list[EngineLimits] = []
    limits, num_blocks, _ = fit_limits(GPU, BLOCK, room_of(num_bytes, asked))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == expected
    assert num_blocks * 16 >= max(limits.max_num_batched_tokens, 128 * limits.max_num_seqs)
    # The cache has what the smaller steps leave.
    assert num_blocks == (num_bytes - 100 * limits.max_num_seqs - 10 * limits.max_num_batched_tokens) // BLOCK - 1
    assert len(asked) <= 4


def test_chosen_limits_stay() -> None:
    chosen = replace(GPU, lowered=frozenset())
    limits, num_blocks, _ = fit_limits(chosen, BLOCK, room_of(50_000, []))
    assert limits == chosen and num_blocks == 2
    with pytest.raises(ModelLoadError, match="40000 bytes leave too little for the KV cache"):
        fit_limits(chosen, BLOCK, room_of(40_000, []))
    some = replace(GPU, lowered=frozenset({"max_num_seqs"}))
    limits, _, _ = fit_limits(some, BLOCK, room_of(50_000, []))
    assert limits.max_num_batched_tokens == 2048 and limits.max_num_seqs < 256


def test_memory_without_room_for_the_smallest_steps_is_an_error() -> None:
    asked: list[EngineLimits] = []
    with pytest.raises(ModelLoadError, match="2 blocks need 2000 bytes"):
        fit_limits(GPU, BLOCK, room_of(500, asked))
    assert len(asked) <= 12 and (asked[-1].max_num_seqs, asked[-1].max_num_batched_tokens) == (1, 2)


def test_the_sentence_names_limits_and_reason() -> None:
    after = replace(GPU, max_num_seqs=50)
    assert describe_lowered(GPU, after, 400) == (
        "max_num_seqs from 256 to 50: the KV cache holds 6,400 tokens; "
        "give it more memory, or set the limits to keep them"
    )
    both = describe_lowered(GPU, replace(after, max_num_batched_tokens=1600), 100)
    assert both is not None and "to 50 and max_num_batched_tokens from 2,048 to 1,600: " in both
    assert describe_lowered(GPU, GPU, 1) is None


def test_a_replica_runs_with_the_lowered_limits_and_notes_them() -> None:
    path = cached_checkpoint("llama", with_tokenizer=True)
    options = ReplicaOptions(
        ModelOptions(str(path), device="cpu", dtype="float32", kernel_cache_dir=None),
        RunnerOptions(kv_cache_bytes=2**17),
        replace(GPU, max_num_seqs=64, max_num_batched_tokens=512),
    )
    loaded: list[Backend] = []

    def load(given: ReplicaOptions) -> Backend:
        loaded.append(load_torch_backend(given))
        return loaded[0]

    card = ModelReplica(options, "replica", "node", load).card
    assert 0 < 128 * card.max_num_seqs <= card.num_blocks * card.block_size < 128 * 64
    assert [note for note in card.notes if note.startswith(f"max_num_seqs from 64 to {card.max_num_seqs}")]
    assert loaded[0].limits is not None and loaded[0].limits.max_num_seqs == card.max_num_seqs
