"""Cost of grammars: `python -m bench.structured.grammar_masks --vocabulary FILE.gguf`.

1. Masks of 64 sequences with distinct schemas of 10 to 50 properties and a vocabulary of 151,936 tokens, in the threads
   of a replica, at each token of a document; beside the forward pass of shape Q with 64 sequences.
2. Compilation of a schema of 10 to 50 properties, with its reduction and its check.
3. Tokens a second of 16 sequences of shape Q of which 8 are constrained, against none, by turns.

The vocabulary is that of Qwen2, in llama.cpp's `models/ggml-vocab-qwen2.gguf`; without `--vocabulary` it is taken out
of the source archive of llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.engine.decode_steps import build
from bench.engine.engines import decode_batch
from bench.engine.models import model_directory
from bench.record import percentiles, write
from replicas.engine.batch import BatchColumns, ScheduledBatch, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.masks import MaskThreads
from replicas.protocol import GenerateRequest, SamplingParams
from replicas.text.grammar import GrammarCompiler, GrammarConstraint, json_schema_grammar
from serve_app.openai.structured.json_schema import Schema, enforceable_schema

_MEMBER = "vendor/llama.cpp/models/ggml-vocab-qwen2.gguf"
_VOCAB_SIZE = 151_936
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "answers", "with", "text", "12")


def vocabulary(path: Path | None, folder: Path) -> PreTrainedTokenizerFast:
    """Return Qwen2's tokenizer from a GGUF file, by default that of llama-cpp-python's source archive."""
    if path is None:
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "llama-cpp-python"]
        subprocess.run([*fetch, "--dest", str(folder)], check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as members:
            (member,) = (one for one in members.getmembers() if one.name.endswith(_MEMBER))
            members.extract(member, folder, filter="data")
            path = folder / member.name
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return tokenizer


def schema_of(number: int) -> Schema:
    """Return a schema of 10 to 50 properties that no other number has."""
    rng = random.Random(number)
    kinds: tuple[Schema, ...] = (
        {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 5}, {"enum": ["red", "green", "blue"]},
        {"type": "string", "format": "date"}, {"type": ["string", "null"]},
    )  # fmt: skip
    names = [f"field_{number}_{index}" for index in range(rng.randint(10, 50))]
    properties = {name: rng.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def document_of(schema: Schema, rng: random.Random) -> str:
    """Return a document of one of these schemas."""

    def text() -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randint(2, 15)))

    def value(kind: Schema) -> Any:
        match kind:
            case {"enum": values}:
                return rng.choice(values)
            case {"format": "date"}:
                return "2026-01-31"
            case {"type": "integer"}:
                return rng.randrange(10**6)
            case {"type": "number"}:
                return round(rng.uniform(0, 1000), 3)
            case {"type": "boolean"}:
                return rng.random() < 0.5
            case {"type": "array"}:
                return [text() for _ in range(3)]
        return text()

    return json.dumps({name: value(kind) for name, kind in schema["properties"].items()})


def sequences_of(compiler: GrammarCompiler, number: int) -> list[Sequence]:
    """Return sequences with a constraint each."""
    made = []
    for index in range(number):
        grammar = json_schema_grammar(enforceable_schema(schema_of(index), "schema").schema)
        asked = GenerateRequest(str(index), (1,), SamplingParams(max_tokens=1, grammar=grammar))
        made.append(Sequence(asked, 0.0, None, index, compiler.constraint_of(asked)))
    return made


def mask_times(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, num_threads: int) -> list[float]:
    """Return the milliseconds of the masks of 64 sequences, at each token of their documents."""
    sequences, rng = sequences_of(compiler, 64), random.Random(1)
    documents = [tokenizer.encode(document_of(schema_of(index), rng)) for index in range(64)]
    threads = MaskThreads(_VOCAB_SIZE, num_threads)
    columns = BatchColumns.of([ScheduledSequence.of(sequence, 0, 1) for sequence in sequences])
    times = []
    for step in range(min(map(len, documents))):
        started_s = time.perf_counter()
        masks = threads.masks_of(columns)
        assert masks is not None
        masks.message()
        times.append((time.perf_counter() - started_s) * 1e3)
        for sequence, document in zip(sequences, documents, strict=True):
            assert sequence.constraint is not None
            sequence.constraint.accept(document[step])
    return times


def compile_times(compiler: GrammarCompiler) -> list[float]:
    """Return the CPU milliseconds of the ingress for a new schema: reduction, compilation and check."""
    times = []
    for number in range(1000, 1100):
        started_s = time.thread_time()
        grammar = json_schema_grammar(enforceable_schema(schema_of(number), "schema").schema)
        compiler.check(grammar, "schema")
        times.append((time.thread_time() - started_s) * 1e3)
    return times


class Fixed:
    """Constraint that has come to one place of a document and stays there, so that a step can be repeated."""

    is_complete = False
    error: str | None = None

    def __init__(self, constraint: GrammarConstraint) -> None:
        self.fill_mask = constraint.fill_mask

    def accept(self, token_id: int) -> None:
        """Do nothing."""

    def forced_token_id(self) -> None:
        """Leave the token to the mask."""


def constrained(batch: ScheduledBatch, constraints: list[GrammarConstraint]) -> ScheduledBatch:
    """Return a batch whose first items have these constraints."""
    items = []
    for index, item in enumerate(batch.items):
        old = item.sequence
        held = Fixed(constraints[index]) if index < len(constraints) else None
        new = Sequence(old.request, 0.0, None, index, held)
        new.token_ids[:] = old.token_ids
        new.block_table, new.num_computed_tokens, new.status = old.block_table, old.num_computed_tokens, old.status
        items.append(replace(item, sequence=new))
    return ScheduledBatch(tuple(items))


def step_times(runner: TorchModelRunner, batches: list[ScheduledBatch], rounds: int) -> list[list[float]]:
    """Return each batch's milliseconds of a step, measured by turns."""
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(rounds + 1):
        for batch, own in zip(batches, times, strict=True):
            started_s = time.perf_counter()
            runner.execute(batch)
            own.append((time.perf_counter() - started_s) * 1e3)
    return [own[1:] for own in times]


def summary(times: list[float]) -> dict[str, float]:
    """Return median, p99 and minimum in milliseconds."""
    median, p99 = percentiles(times, (50, 99))
    return {"median_ms": round(median, 3), "p99_ms": round(p99, 3), "min_ms": round(min(times), 3), "steps": len(times)}


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, help="GGUF file of Qwen2's vocabulary")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "headway-models")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, and of the masks")
    parser.add_argument("--name", default="grammar_masks", help="name of the result in bench/results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = vocabulary(arguments.vocabulary, Path(folder))
    compiler = GrammarCompiler(tokenizer, _VOCAB_SIZE)
    masks = mask_times(compiler, tokenizer, arguments.threads)
    compilations = compile_times(compiler)
    runner = build(model_directory(arguments.models, "Q"), torch.bfloat16, "compiled")
    (forward,) = step_times(runner, [decode_batch(runner, 64, 256)], arguments.rounds)
    free = decode_batch(runner, 16, 256)
    held = [sequence.constraint for sequence in sequences_of(compiler, 8)]
    half = constrained(free, [one for one in held if isinstance(one, GrammarConstraint)])
    without, beside = step_times(runner, [free, half], 2 * arguments.rounds)
    figures = {
        "masks_of_64": summary(masks), "forward_of_64": summary(forward), "compile_cpu": summary(compilations),
        "step_of_16_free": summary(without), "step_of_16_half_constrained": summary(beside),
        "masks_over_forward": round(statistics.median(masks) / statistics.median(forward), 4),
        "tokens_per_s_ratio": round(
            statistics.median(a / b for a, b in zip(without, beside, strict=True)), 4
        ),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    print(write(arguments.name, {**{key: str(value) for key, value in vars(arguments).items()}, **figures}))


if __name__ == "__main__":
    main()
