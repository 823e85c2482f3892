"""Quality cost of quantized weights: a model's bits per byte of held-out text, and the error of its logits.

The replica's runner computes the same texts with the original weights and with weights rounded to 8 or 4 bits.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from bench.engines import model_parser
from bench.record import write
from replicas.demo.corpus import load_corpus, standard_library
from replicas.demo.tokenization import END_OF_TEXT
from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.select import choose_attention
from replicas.model.batch.inputs import build_inputs
from replicas.model.loading.loader import LoadedModel, load_model
from replicas.model.loading.options import ModelOptions
from replicas.protocol import GenerateRequest, SamplingParams

_BLOCK_SIZE = 16


@dataclass(slots=True)
class Totals:
    """Sums over tokens."""

    num_tokens: int = 0
    num_bytes: int = 0
    nats: float = 0.0
    int8_nats: float = 0.0
    squared_error: float = 0.0
    squared_logits: float = 0.0
    num_same_choice: int = 0


@torch.inference_mode()
def logits_of(loaded: LoadedModel, token_ids: list[int]) -> Tensor:
    """Return the logits after each of `token_ids`, [num_tokens, vocab_size] float32."""
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    request = GenerateRequest("text", tuple(token_ids), SamplingParams(max_tokens=1))
    sequence = Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=0)
    sequence.block_table = list(range(1, num_blocks + 1))
    cache = KVCache(loaded.layers, num_blocks, _BLOCK_SIZE, loaded.dtype, loaded.device)
    inputs = build_inputs([ScheduledSequence(sequence, 0, num_tokens)], _BLOCK_SIZE, loaded.device)
    attention = choose_attention(loaded.attention_spec(_BLOCK_SIZE), "auto")
    return loaded.logits(attention(cache, inputs), inputs.input_ids, inputs.position_ids, rows=0).float()


def compare(plain: LoadedModel, int8: LoadedModel, max_files: int, end_s: float) -> Totals:
    """Compare over the first context of each held-out file, until the time is up."""
    totals = Totals()
    assert plain.tokenizer is not None
    separator = plain.tokenizer.get_vocab()[END_OF_TEXT]
    for file in load_corpus(standard_library()).held_out[:max_files]:
        if time.monotonic() > end_s:
            break
        ids = [separator, *plain.tokenizer(file.text, verbose=False)["input_ids"]][: plain.max_model_len]
        targets = torch.tensor(ids[1:])
        logits, moved = logits_of(plain, ids[:-1]), logits_of(int8, ids[:-1])
        totals.num_tokens += len(targets)
        totals.num_bytes += len(plain.tokenizer.decode(ids[1:]).encode())
        totals.nats += float(functional.cross_entropy(logits, targets, reduction="sum"))
        totals.int8_nats += float(functional.cross_entropy(moved, targets, reduction="sum"))
        centred, error = logits - logits.mean(-1, keepdim=True), moved - logits
        totals.squared_error += float((error - error.mean(-1, keepdim=True)).square().sum())
        totals.squared_logits += float(centred.square().sum())
        totals.num_same_choice += int((logits.argmax(-1) == moved.argmax(-1)).sum())
    return totals


def main() -> None:
    """Compare, print, record."""
    parser = model_parser(__doc__, name=None, num_threads=1, dtype="bfloat16")
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--quantization", choices=["int8", "int4"], default="int8")
    parser.add_argument("--seconds", type=float, default=60.0, help="no file is started after this time")
    arguments = parser.parse_args()
    options = ModelOptions(arguments.model, dtype=arguments.dtype, device="cpu", num_threads=arguments.threads)
    plain, int8 = load_model(options), load_model(replace(options, quantization=arguments.quantization))
    totals = compare(plain, int8, arguments.files, time.monotonic() + arguments.seconds)
    to_bits = 1 / math.log(2) / totals.num_bytes
    figures = {
        "num_tokens": totals.num_tokens,
        "bits_per_byte": totals.nats * to_bits,
        f"{arguments.quantization}_bits_per_byte": totals.int8_nats * to_bits,
        "relative_logit_error": math.sqrt(totals.squared_error / totals.squared_logits),
        "same_greedy_choice": totals.num_same_choice / totals.num_tokens,
    }
    for name, value in figures.items():
        print(f"{name}: {value:.5g}")
    if arguments.name:
        print(write(arguments.name, figures))


if __name__ == "__main__":
    main()
