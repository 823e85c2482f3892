"""Evaluation of a saved model: bits per byte on the held-out files, beside those of xz on the same files."""

import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from testkit.demo_model.corpus import SourceFile, load_corpus, standard_library
from testkit.demo_model.tokenization import END_OF_TEXT, MAX_CONTEXT_TOKENS

BUCKETS = ((0, 512), (512, 1024), (1024, 2048))
XZ_PRESET = 9


@dataclass(frozen=True, slots=True)
class FileLoss:
    """Loss of the model on one file: nats of each token, in windows. The last window may be shorter."""

    num_bytes: int
    windows: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class XzSize:
    """Bits per byte of `xz -9`: each file compressed alone, and all files concatenated."""

    per_file: float
    concatenated: float


class Evaluator:
    """Scorer of files by the model in a folder, in bfloat16 as saved."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)

    @torch.inference_mode()
    def file_loss(self, file: SourceFile) -> FileLoss:
        """Score every token of `file` once, in windows of 2048 that do not overlap.

        The context of the first window is the end-of-text token, and of each later window the last token before it.
        """
        separator = self._tokenizer.get_vocab()[END_OF_TEXT]
        ids = torch.tensor([separator, *self._tokenizer(file.text, verbose=False)["input_ids"]])
        windows = []
        for start in range(0, len(ids) - 1, MAX_CONTEXT_TOKENS):
            inputs = ids[start : start + MAX_CONTEXT_TOKENS]
            targets = ids[start + 1 : start + 1 + MAX_CONTEXT_TOKENS]
            logits = self._model(inputs[: len(targets)][None], use_cache=False).logits[0].float()
            windows.append(nn.functional.cross_entropy(logits, targets, reduction="none"))
        return FileLoss(len(file.text.encode()), tuple(windows))


def bits_per_byte(losses: Sequence[FileLoss]) -> float:
    """Return the loss over all tokens, in bits, divided by the UTF-8 bytes of all files."""
    nats = sum(float(window.sum()) for loss in losses for window in loss.windows)
    return nats / math.log(2) / sum(loss.num_bytes for loss in losses)


def xz_bits_per_byte(files: Sequence[SourceFile]) -> XzSize:
    """Return the bits per byte of `xz -9` for `files`."""
    contents = [file.text.encode() for file in files]
    num_bytes = sum(map(len, contents))
    alone = sum(len(lzma.compress(content, preset=XZ_PRESET)) for content in contents)
    together = len(lzma.compress(b"".join(contents), preset=XZ_PRESET))
    return XzSize(8 * alone / num_bytes, 8 * together / num_bytes)


def bucket_losses(losses: Sequence[FileLoss]) -> list[float]:
    """Return mean nats per token in each bucket of positions.

    Only full windows count, so all buckets cover the same files.
    """
    full = torch.stack([window for loss in losses for window in loss.windows if len(window) == MAX_CONTEXT_TOKENS])
    return [float(full[:, start:end].mean()) for start, end in BUCKETS]


def evaluate(directory: Path) -> None:
    """Print the held-out figures of the model in `directory`."""
    files = load_corpus(standard_library()).held_out
    evaluator = Evaluator(directory)
    losses = []
    for file in files:
        losses.append(evaluator.file_loss(file))
        print(f"{bits_per_byte(losses[-1:]):.3f}  {losses[-1].num_bytes:6d} bytes  {file.path}", flush=True)
    xz = xz_bits_per_byte(files)
    print(f"held-out: {len(files)} files, {sum(loss.num_bytes for loss in losses)} bytes")
    print(f"model: {bits_per_byte(losses):.3f} bits per byte")
    print(f"xz -9: {xz.per_file:.3f} per file, {xz.concatenated:.3f} as one concatenation")
    for (start, end), nats in zip(BUCKETS, bucket_losses(losses), strict=True):
        print(f"positions {start}-{end}: {nats:.3f} nats per token")
