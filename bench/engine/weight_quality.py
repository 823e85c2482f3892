"""Quality of a model's weights and KV cache in each format: bits per byte of text, share of equal greedy choices.

    python -m bench.engine.weight_quality --checkpoint bf16=model-f16.gguf --checkpoint Q8_0=model-q8_0.gguf \\
        --quantization int8 int4 --kv-cache int8 fp8 --rounded GPTQ AWQ

The first checkpoint is the one that the others are compared with. `--quantization` rounds it as it is loaded,
`--kv-cache` keeps its keys and values in 8 bits, and `--rounded` writes it in a format of
`testkit.model.quantized_checkpoints`, rounded to nearest. The texts are the first
tokens of articles of Python's language reference, which `pydoc_data.topics` holds. A replica's model computes them.
`--llama-cpp` has llama.cpp compute the same tokens from the same GGUF files.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn import functional

from bench.record import write
from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.select import choose_attention
from replicas.model.batch.inputs import build_inputs
from replicas.model.hardware.device import choose_cache_dtype
from replicas.model.layers.rounding import ROUNDINGS
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions
from replicas.protocol import GenerateRequest, SamplingParams
from serve_app.models.local_models import local_checkpoint
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint

_BLOCK_SIZE = 16
_LEAST_CHARACTERS = 1500
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Figures:
    """Quality of one format."""

    format: str
    weights: str
    """Words of the replica about the format in the checkpoint and in memory."""
    mib: float
    """Memory of the weights."""
    bits_per_byte: float
    same_choice: float
    """Share of tokens after which the likeliest token is that of the first checkpoint."""
    num_tokens: int
    llama_cpp_bits_per_byte: float | None
    """llama.cpp's figure for the same GGUF file; None: not asked for, or no such file."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format of weights and KV cache."""

    name: str
    model: ModelOptions
    cache: str = "auto"
    gguf_file: str | None = None


@torch.inference_mode()
def logits_of(loaded: LoadedModel, token_ids: list[int], cache: str) -> Tensor:
    """Return the logits after each of `token_ids`, [num_tokens, vocab_size] float32."""
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    request = GenerateRequest("text", tuple(token_ids), SamplingParams(max_tokens=1))
    sequence = Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=0)
    sequence.block_table = list(range(1, num_blocks + 1))
    dtype = choose_cache_dtype(cache, loaded.dtype)
    blocks = KVCache(loaded.layers, num_blocks, _BLOCK_SIZE, dtype, loaded.device)
    inputs = build_inputs([ScheduledSequence.of(sequence, 0, num_tokens)], _BLOCK_SIZE, loaded.device)
    attention = choose_attention(loaded.attention_spec(_BLOCK_SIZE, dtype), "auto")
    return loaded.logits(attention(blocks, inputs), inputs.input_ids, inputs.position_ids, rows=0).float()


def figures_of(made: Format, arguments: argparse.Namespace, choices: list[Tensor]) -> Figures:
    """Return the figures of one format. `choices` are the first checkpoint's, and filled if there are none yet."""
    loaded = load_model(made.model)
    assert loaded.tokenizer is not None
    num_tokens, num_bytes, num_same, nats, is_first = 0, 0, 0, 0.0, not choices
    texts: list[list[int]] = []
    articles = [text for _, text in sorted(topics.items()) if len(text) >= _LEAST_CHARACTERS][: arguments.texts]
    for number, article in enumerate(articles):
        ids = loaded.tokenizer(article, verbose=False)["input_ids"][: arguments.tokens]
        texts.append(ids)
        targets, logits = torch.tensor(ids[1:]), logits_of(loaded, ids[:-1], made.cache)
        nats += float(functional.cross_entropy(logits, targets, reduction="sum"))
        if is_first:
            choices.append(logits.argmax(-1))
        num_same += int((logits.argmax(-1) == choices[number]).sum())
        num_tokens += len(targets)
        num_bytes += len(loaded.tokenizer.decode(ids[1:]).encode())
    others = None
    if made.gguf_file and arguments.llama_cpp:
        others = llama_cpp_nats(arguments.llama_cpp, made.gguf_file, texts) / math.log(2) / num_bytes
    memory = {each.data_ptr(): each.nbytes for each in loaded.model.state_dict().values()}
    return Figures(
        made.name,
        loaded.weights,
        round(sum(memory.values()) / _MIB, 1),
        round(nats / math.log(2) / num_bytes, 4),
        round(num_same / num_tokens, 4),
        num_tokens,
        None if others is None else round(others, 4),
    )


def llama_cpp_nats(python: str, gguf_file: str, texts: list[list[int]]) -> float:
    """Return the sum of -log p over all tokens but each text's first in llama.cpp, in nats."""
    command = [python, "-m", "bench.peers.llama_cpp_nats", gguf_file]
    ended = subprocess.run(command, input=json.dumps(texts), check=True, stdout=subprocess.PIPE, text=True)
    return float(sum(json.loads(ended.stdout)))


def formats(arguments: argparse.Namespace, directory: Path) -> Iterator[Format]:
    """Yield each format; `directory` is for checkpoints that are made here."""
    named = [each.partition("=") for each in arguments.checkpoint]
    first, *_ = plain = [
        ModelOptions(local_checkpoint(path), dtype=arguments.dtype, device="cpu", num_threads=arguments.threads)
        for _, _, path in named
    ]
    for (name, _, path), model in zip(named, plain, strict=True):
        yield Format(name, model, gguf_file=path if path.endswith(".gguf") else None)
    for quantization in arguments.quantization:
        yield Format(f"quantization={quantization}", replace(first, quantization=quantization))
    for cache in arguments.kv_cache:
        yield Format(f"kv_cache_dtype={cache}", first, cache)
    for name in arguments.rounded:
        path = quantize_checkpoint(Path(first.path), directory / name, METHODS[name])
        yield Format(name, replace(first, path=str(path)))


def main() -> None:
    """Compare, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", action="append", required=True, metavar="NAME=PATH", help="directory, hub id or GGUF file"
    )
    parser.add_argument("--quantization", nargs="*", default=[], choices=list(ROUNDINGS))
    parser.add_argument("--kv-cache", nargs="*", default=[], choices=["int8", "fp8"])
    parser.add_argument("--rounded", nargs="*", default=[], choices=list(METHODS))
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", help="name of the result file; without one nothing is written")
    arguments = parser.parse_args()
    rows: list[Figures] = []
    choices: list[Tensor] = []
    with tempfile.TemporaryDirectory(prefix="headway-quality-") as directory:
        for made in formats(arguments, Path(directory)):
            rows.append(figures_of(made, arguments, choices))
            row = rows[-1]
            bits = f"{row.bits_per_byte:.4f} ({row.llama_cpp_bits_per_byte})"
            print(f"{row.format:24} {row.mib:7.1f} MiB  {bits}  {row.same_choice:.4f}  {row.weights}", flush=True)
    if arguments.name:
        print(write(arguments.name, {"dtype": arguments.dtype, "formats": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
