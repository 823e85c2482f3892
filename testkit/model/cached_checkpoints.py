"""Cache on disk of tiny checkpoints and of transformers' output for them, which several test modules share."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from testkit.model import engine_runs, tiny_checkpoints
from testkit.model.engine_runs import Prompt, reference_model, reference_tokens
from testkit.model.tiny_checkpoints import write_checkpoint

_ROOT = Path(__file__).resolve().parents[2] / ".pytest_cache" / "tiny"


def cached_checkpoint(architecture: str, with_tokenizer: bool = False) -> Path:
    """Return the checkpoint that `write_checkpoint` writes. Tests must not change it."""
    name = f"{architecture}-with-tokenizer" if with_tokenizer else architecture
    return _made_once(name, lambda path: write_checkpoint(path, architecture, with_tokenizer))


def cached_reference(architecture: str, prompts: list[Prompt], num_tokens: int) -> list[list[int]]:
    """Return the greedy output of `generate()` in float32 for each prompt alone."""

    def compute() -> list[list[int]]:
        return reference_tokens(reference_model(cached_checkpoint(architecture)), prompts, num_tokens)

    found: list[list[int]] = _computed_once(f"{architecture}-tokens", (prompts, num_tokens), compute)
    return found


def cached_log_probabilities(architecture: str, prompts: list[Prompt], dtype: torch.dtype) -> Tensor:
    """Return log probabilities of the token after each prompt, by transformers, [num_prompts, vocab_size] float32."""

    def compute() -> list[list[float]]:
        model = reference_model(cached_checkpoint(architecture), dtype)
        with torch.inference_mode():
            rows = [model(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts]
        return [row.log_softmax(-1).tolist() for row in rows]

    return torch.tensor(_computed_once(f"{architecture}-log-probabilities", (prompts, dtype), compute))


def _computed_once(name: str, arguments: object, compute: Callable[[], Any]) -> Any:
    """Return the result of `compute` for `arguments`: lists and numbers, from the cache if they are there."""
    number = hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]
    path = _made_once(f"{name}-{number}.json", lambda path: path.write_text(json.dumps(compute())))
    return json.loads(path.read_text())


def _made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the file or folder of this name, made if it is missing. Several processes may make it at once."""
    path = _directory() / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=_directory(), prefix="new-") as folder:
            made = Path(folder) / name
            make(made)
            try:
                made.rename(path)
            except OSError:
                assert path.exists(), f"{path} cannot be written"
    return path


@cache
def _directory() -> Path:
    """Return the folder for this version of the libraries and of the test kit; delete those of other versions."""
    versions = hashlib.sha256(repr((torch.__version__, transformers.__version__)).encode())
    for module in (tiny_checkpoints, engine_runs):
        assert module.__file__ is not None
        versions.update(Path(module.__file__).read_bytes())
    directory = _ROOT / versions.hexdigest()[:16]
    for other in _ROOT.glob("*"):
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
