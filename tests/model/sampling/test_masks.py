"""Masks forbid tokens of their rows and of no others, and no constraint is used by two threads at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.inputs import NO_LAST_ROWS
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.sampling import multinomial
from replicas.model.sampling.masks import MaskThreads, RowMasks
from replicas.model.sampling.sampler import Sampler, SamplingPlanner
from replicas.protocol import GenerateRequest, SamplingParams

CPU = torch.device("cpu")
EOS = 2


class Tokens:
    """Constraint that allows the same tokens all the time; filling a mask may take a while, and only one may."""

    is_complete = False
    error: str | None = None

    def __init__(self, *allowed: int, seconds: float = 0.0) -> None:
        self._allowed = allowed
        self._seconds = seconds
        self._lock = threading.Lock()
        self.num_filled = 0

    def accept(self, token_id: int) -> None:
        assert token_id in self._allowed

    def forced_token_id(self) -> int | None:
        return None

    def fill_mask(self, mask: memoryview) -> None:
        assert self._lock.acquire(blocking=False), "two threads use one constraint"
        time.sleep(self._seconds)
        mask[:] = bytes(len(mask))
        for token_id in self._allowed:
            mask[token_id // 8] |= 1 << token_id % 8
        self.num_filled += 1
        self._lock.release()


def item(constraint: Tokens | None, **params: object) -> ScheduledSequence:
    asked = GenerateRequest("request", (5,), SamplingParams(max_tokens=9, **params))  # type: ignore[arg-type]
    return ScheduledSequence.of(Sequence(asked, 0.0, None, 0, constraint), 0, 1)


def masks_of(vocab_size: int, *items: ScheduledSequence) -> RowMasks | None:
    pending = MaskThreads(vocab_size, 2).masks_of(BatchColumns.of(items))
    return None if pending is None else pending.message().place(CPU)


def sample(logits: torch.Tensor, *items: ScheduledSequence) -> list[int | None]:
    to_device, to_host = HostToDeviceBuffer(), DeviceToHostBuffer()
    plan = SamplingPlanner(frozenset({EOS}), logits.shape[1]).plan(BatchColumns.of(items), NO_LAST_ROWS, to_device)
    on_device = DeviceBuffer.of(to_device.words, no_tokens(CPU))
    launched = Sampler().launch(plan, logits, None, on_device, to_host, masks_of(logits.shape[1], *items))
    to_host.close(CPU)
    to_host.wait()
    return [result.token_id for result in launched.read(to_host, BatchColumns.of(items))]


@pytest.mark.parametrize("vocab_size", [7, 32, 33, 97, 4099])
def test_masks_forbid_tokens_of_their_rows_alone(vocab_size: int) -> None:
    items = [item(Tokens(0, 3)), item(None), item(Tokens(vocab_size - 1))]
    logits = torch.randn(3, vocab_size)
    masks = masks_of(vocab_size, *items)
    assert masks is not None
    masked = logits.clone()
    masks.apply(masked)
    allowed = [[int(token) for token in row.isfinite().nonzero()[:, 0]] for row in masked]
    assert allowed == [[0, 3], list(range(vocab_size)), [vocab_size - 1]]
    assert torch.equal(masked[masked.isfinite()], logits[masked.isfinite()])


def test_without_constraints_there_are_no_masks() -> None:
    assert masks_of(97, item(None), item(None)) is None


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_the_head_beyond_the_vocabulary_are_no_tokens(rows: int) -> None:
    masks = masks_of(40, *[item(Tokens(1)), item(None)][:rows])
    assert masks is not None
    masked = torch.zeros(rows, 128)
    masks.apply(masked)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [1]
    assert rows == 1 or bool(masked[1].isfinite().all())


@pytest.mark.parametrize("params", [
    {"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.1}, {"temperature": 1.0, "top_p": 0.99, "frequency_penalty": 2.0},
])  # fmt: skip
def test_few_allowed_tokens_are_sampled_without_sorting_all(
    params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forbidden tokens among the candidates show that all allowed ones are there, so no more are tried."""
    monkeypatch.setattr(multinomial, "_NUM_CANDIDATES", (256,))
    sorted_counts: list[int] = []
    top_candidates = multinomial._top_candidates

    def counting(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        sorted_counts.append(count)
        return top_candidates(logits, count)

    monkeypatch.setattr(multinomial, "_top_candidates", counting)
    logits = torch.randn(8, 5000)
    chosen = sample(logits, *(item(Tokens(7, 4000, 4999), seed=seed, **params) for seed in range(8)))
    assert set(chosen) <= {7, 4000, 4999}
    assert set(sorted_counts) <= {256}


def test_a_constraint_alone_decides_where_it_leaves_one_token() -> None:
    logits = torch.zeros(3, 97)
    assert sample(logits, *(item(Tokens(9), seed=1, temperature=1.5, **params) for params in (
        {"min_tokens": 5, "stop_token_ids": (9,)}, {"top_k": 1}, {"presence_penalty": 2.0}
    ))) == [9, 9, 9]  # fmt: skip


def test_stop_tokens_before_min_tokens_come_only_if_nothing_else_may() -> None:
    logits = torch.zeros(20, 97)
    logits[:, 9] = 50.0
    items = [item(Tokens(9, 11, EOS), seed=seed, min_tokens=5, stop_token_ids=(9,)) for seed in range(20)]
    assert set(sample(logits, *items)) == {11}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_own_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 97).to(dtype)
    before = logits.clone()
    assert sample(logits, item(Tokens(4)), item(Tokens(5), logit_bias=())) == [4, 5]
    assert torch.equal(logits, before)


def test_a_row_without_any_allowed_token_is_an_error() -> None:
    assert sample(torch.zeros(2, 97), item(Tokens()), item(Tokens(4))) == [None, 4]


def test_masks_of_a_step_that_failed_are_waited_for() -> None:
    threads, constraint = MaskThreads(97, 2), Tokens(1, seconds=0.05)
    assert (
        threads.masks_of(BatchColumns.of([item(constraint)])) is not None
    )  # Its step fails before the masks are placed.
    threads.settle()
    again = threads.masks_of(BatchColumns.of([item(constraint)]))
    assert again is not None and again.message().rows.tolist() == [0]
    assert constraint.num_filled == 2
