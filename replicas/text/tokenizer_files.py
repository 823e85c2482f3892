"""Files of a model that need no torch: its tokenizer, and others by name.

Functions import transformers, since it takes half a second and not every process that imports this module needs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SMALL_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
HUB_FILES = [*SMALL_HUB_FILES, "*.safetensors"]
"""Patterns of the files of a hub model that are fetched."""

UNUSED_HUB_FILES = ["*/*", "consolidated*"]
"""Patterns of files among them that are not: folders hold other formats, and some models have their weights twice."""


def model_file(model: str, name: str) -> Path | None:
    """Return the path of one file of `model`, a directory or hub id; None if the model has no such file."""
    from transformers.utils import cached_file

    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def vocab_size_of(model: str) -> int | None:
    """Return the number of tokens that the config of `model` names, a directory or hub id; None: it names none."""
    path = model_file(model, "config.json")
    if path is None:
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `model`, a directory or hub id, without running code that comes with the model.

    A model of text and images may have its chat template in `chat_template.json`, where its processor looks for it.

    If the model has a tokenizer.json, only that file defines the tokenizer. transformers' classes for model families
    may split texts differently, and import torch into processes that do not need it. They are used only for models
    without a tokenizer.json.

    Raises:
        OSError, ValueError, KeyError: the model has no tokenizer, or none of the `tokenizers` library.
    """
    from transformers import PreTrainedTokenizerFast

    if model_file(model, "tokenizer.json") is not None:
        return _with_template(PreTrainedTokenizerFast.from_pretrained(model), model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of `{model}` has no `tokenizers` backend (tokenizer.json)")
    return _with_template(tokenizer, model)


def _with_template(tokenizer: PreTrainedTokenizerFast, model: str) -> PreTrainedTokenizerFast:
    """Give a tokenizer without a chat template that of the model's processor, if it has one."""
    path = None if tokenizer.chat_template else model_file(model, "chat_template.json")
    if path is not None:
        tokenizer.chat_template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer
