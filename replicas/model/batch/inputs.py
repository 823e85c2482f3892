"""Inputs of one forward pass over a flat batch: tensors on the device, and chunks on the host.

Dummy batches serve warm-up, memory measurements and checks. They use the scratch block, which no sequence owns.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in the flat batch: rows [row, row + num_tokens), positions [start, end)."""

    row: int
    start: int
    end: int
    block_table: list[int]
    """Block table of the sequence, not a copy; block_table[p // block_size] holds position p."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in this pass."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Inputs of one forward pass over a flat batch: sequences are concatenated in one row, without padding."""

    input_ids: Tensor  # [1, num_tokens] int64
    position_ids: Tensor  # [1, num_tokens] int64
    slots: Tensor  # [num_tokens] int64: slot of each token's key and value
    partial_blocks: Tensor | None
    """[num_blocks] int64: blocks that this pass begins and does not fill; None if there are none.

    The gather backend clears them, since it also reads their unused slots, under a mask: a stale NaN times a zero
    weight is still NaN.
    """
    logits_rows: Tensor  # [num_rows] int64: rows of the tokens whose logits are computed, in order of the items
    chunks: tuple[Chunk, ...]
    """Chunks on the host, one per item. The attention backends make their own plans from them."""


def wants_prompt_logprobs(item: ScheduledSequence) -> bool:
    """Return True if the item gives log probabilities of prompt tokens."""
    return item.sequence.request.params.prompt_logprobs is not None and item.start < item.sequence.num_prompt_tokens - 1


def num_logits_rows(item: ScheduledSequence) -> int:
    """Return the number of logits rows that the item needs: all its positions to score, the last one to sample."""
    return item.num_tokens if wants_prompt_logprobs(item) else int(item.samples)


def build_inputs(items: Items[ScheduledSequence], block_size: int, device: torch.device) -> BatchInputs:
    """Return the inputs of `items` on `device`. The host must know all tokens of the items."""
    to_device = HostToDeviceBuffer()
    plan = InputPlan(items, block_size, LastSampledTokens.none(device), to_device)
    return plan.place(to_device.send(device))


@dataclass(frozen=True, slots=True)
class LastSampledTokens:
    """Tokens that the previously launched step samples. The host may not know them yet."""

    tokens: Tensor  # [num_rows] int64, on the device
    row_by_sequence: dict[Sequence, int]
    """Row of each sequence's token in `tokens`."""

    @classmethod
    def none(cls, device: torch.device) -> LastSampledTokens:
        """Return an instance without tokens, as before the first step."""
        return cls(torch.empty(0, dtype=torch.int64, device=device), {})


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Numbers of a flat batch on the host: one for each token in `input_ids`, `positions` and `slots`."""

    input_ids: list[int]
    """Token ids; 0 in the place of a placeholder."""
    positions: list[int]
    slots: list[int]
    logits_rows: list[int]
    placeholders: list[tuple[int, Sequence]]
    """Rows of the input tokens that the host does not know yet, and their sequences."""
    chunks: list[Chunk]

    @classmethod
    def of(cls, items: Items[ScheduledSequence], block_size: int) -> FlatBatch:
        """Concatenate the tokens of `items`."""
        batch = cls([], [], [], [], [], [])
        input_ids = batch.input_ids
        for item in items:
            chunk = Chunk(len(input_ids), item.start, item.end, item.sequence.block_table)
            input_ids.extend(item.sequence.token_ids[item.start : item.end])
            if len(input_ids) < chunk.row + chunk.num_tokens:
                batch.placeholders.append((len(input_ids), item.sequence))
                input_ids.append(0)
            batch.positions.extend(range(item.start, item.end))
            _extend_slots(batch.slots, chunk, block_size)
            batch.logits_rows.extend(range(len(input_ids) - num_logits_rows(item), len(input_ids)))
            batch.chunks.append(chunk)
        return batch


class InputPlan:
    """Plan of a flat batch's inputs. Construction adds their numbers to `to_device`, and `place` makes tensors of them.

    An input token that the host does not know yet is a placeholder, which `place` fills on the device from the tokens
    of `last_sampled`.
    """

    def __init__(
        self,
        items: Items[ScheduledSequence],
        block_size: int,
        last_sampled: LastSampledTokens,
        to_device: HostToDeviceBuffer,
    ) -> None:
        batch = FlatBatch.of(items, block_size)
        row_by_sequence = last_sampled.row_by_sequence
        self._chunks = tuple(batch.chunks)
        self._last_sampled = last_sampled
        self._input_ids, self._positions = to_device.ints(batch.input_ids), to_device.ints(batch.positions)
        self._slots = to_device.ints(batch.slots)
        self._partial_blocks = to_device.ints(_partial_blocks(batch.chunks, block_size))
        self._logits_rows = to_device.ints(batch.logits_rows)
        self._placeholder_rows = to_device.ints(row for row, _ in batch.placeholders)
        self._placeholder_sources = to_device.ints(row_by_sequence[sequence] for _, sequence in batch.placeholders)

    def place(self, on_device: DeviceBuffer) -> BatchInputs:
        """Return the inputs as tensors on the device, after `HostToDeviceBuffer.send`."""
        input_ids = on_device.ints(self._input_ids)
        if len(self._placeholder_rows) > 0:
            input_ids[on_device.ints(self._placeholder_rows)] = self._last_sampled.tokens[
                on_device.ints(self._placeholder_sources)
            ]
        return BatchInputs(
            input_ids=input_ids[None],
            position_ids=on_device.ints(self._positions)[None],
            slots=on_device.ints(self._slots),
            partial_blocks=on_device.ints(self._partial_blocks) if len(self._partial_blocks) > 0 else None,
            logits_rows=on_device.ints(self._logits_rows),
            chunks=self._chunks,
        )


def _partial_blocks(chunks: Items[Chunk], block_size: int) -> list[int]:
    """Return the blocks that the chunks begin and do not fill."""
    return [
        chunk.block_table[chunk.end // block_size]
        for chunk in chunks
        if chunk.end % block_size > 0 and chunk.end - chunk.end % block_size >= chunk.start
    ]


def _extend_slots(slots: list[int], chunk: Chunk, block_size: int) -> None:
    """Append the chunk's slots to `slots`, one block at a time."""
    position = chunk.start
    while position < chunk.end:
        index, offset = divmod(position, block_size)
        length = min(block_size - offset, chunk.end - position)
        first = chunk.block_table[index] * block_size + offset
        slots.extend(range(first, first + length))
        position += length


_TRUNCATED = SamplingParams(max_tokens=1, top_p=0.9)
_EVERY_KIND = (
    SamplingParams(max_tokens=2, temperature=0.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(max_tokens=2, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=2, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, min_tokens=2),
    SamplingParams(max_tokens=2, logit_bias=(LogitBias(0, 1.0),), stop_token_ids=(0,), min_tokens=2),
    SamplingParams(max_tokens=2, allowed_token_ids=(0, 1)),
)
_DEMANDING = SamplingParams(
    max_tokens=2,
    top_p=0.9,
    logprobs=2,
    repetition_penalty=1.1,
    logit_bias=(LogitBias(0, 1.0),),
    allowed_token_ids=(0, 1),
)
_SCORED = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2, logprobs=2)


def dummy_item(start: int, num_tokens: int, block_size: int, params: SamplingParams = _TRUNCATED) -> ScheduledSequence:
    """Return an item that computes positions [start, start + num_tokens) in the scratch block and samples randomly."""
    end = start + num_tokens
    sequence = Sequence(GenerateRequest("scratch", (0,) * end, params), arrival_s=0.0, deadline_s=None, arrival_index=0)
    sequence.block_table = [0] * -(-end // block_size)
    return ScheduledSequence.of(sequence, start, num_tokens)


def batches_of_every_kind(max_num_seqs: int, block_size: int) -> list[ScheduledBatch]:
    """Return small steps with every kind of sampling: decodes alone, decodes beside a prompt, and a scored prompt."""
    decodes = [dummy_item(2, 1, block_size, params) for params in _EVERY_KIND]
    prefills = [dummy_item(0, 3, block_size, params) for params in (_TRUNCATED, _SCORED)]
    return [
        *(ScheduledBatch((decode,)) for decode in decodes),
        *(ScheduledBatch((decode, prefill)[-max_num_seqs:]) for decode in decodes for prefill in prefills),
    ]


def dummy_batches(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[ScheduledBatch]:
    """Return the steps that use most memory.

    They are long prefills, many short prefills, short prefills beside a decode at full length, and many decodes at full
    length, at last with every change of their logits.
    """
    num_whole, rest = divmod(max_num_batched_tokens, max_model_len)
    lengths = ([max_model_len] * num_whole + ([rest] if rest else []))[:max_num_seqs]
    prefills = tuple(dummy_item(max_model_len - length, length, block_size) for length in lengths)
    share = min(max(1, max_num_batched_tokens // max_num_seqs), max_model_len)
    short, decode = dummy_item(0, share, block_size), dummy_item(max_model_len - 1, 1, block_size)
    return [
        ScheduledBatch(prefills),
        ScheduledBatch((short,) * max_num_seqs),
        ScheduledBatch((decode, *(short,) * (max_num_seqs - 1))),
        ScheduledBatch((decode,) * max_num_seqs),
        ScheduledBatch((dummy_item(max_model_len - 1, 1, block_size, _DEMANDING),) * max_num_seqs),
    ]
