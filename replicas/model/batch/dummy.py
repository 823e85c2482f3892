"""Dummy batches for warm-up, memory measurements and checks; they use the scratch block, which no sequence owns."""

from __future__ import annotations

from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.protocol import GenerateRequest, SamplingParams


def dummy_item(start: int, num_tokens: int, block_size: int) -> ScheduledSequence:
    """Return an item that computes positions [start, start + num_tokens) in the scratch block and samples randomly."""
    end = start + num_tokens
    params = SamplingParams(max_tokens=1, top_p=0.9)
    sequence = Sequence(GenerateRequest("scratch", (0,) * end, params), arrival_s=0.0, deadline_s=None, arrival_index=0)
    sequence.block_table = [0] * -(-end // block_size)
    return ScheduledSequence(sequence, start, num_tokens)


def dummy_batches(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[ScheduledBatch]:
    """Return the steps that use most memory.

    They are one long prefill, many short prefills, short prefills beside a decode at full length, and many decodes at
    full length.
    """
    longest = min(max_num_batched_tokens, max_model_len)
    share = min(max(1, max_num_batched_tokens // max_num_seqs), max_model_len)
    prefill = dummy_item(max_model_len - longest, longest, block_size)
    short, decode = dummy_item(0, share, block_size), dummy_item(max_model_len - 1, 1, block_size)
    return [
        ScheduledBatch((prefill,)),
        ScheduledBatch((short,) * max_num_seqs),
        ScheduledBatch((decode, *(short,) * (max_num_seqs - 1))),
        ScheduledBatch((decode,) * max_num_seqs),
    ]
