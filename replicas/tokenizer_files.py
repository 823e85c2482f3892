"""Tokenizer of a model, loaded from the model's files."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `model`, a directory or hub id, without running code that comes with the model.

    If the model has a tokenizer.json, only that file defines the tokenizer. transformers' classes for model families
    may split texts differently, and import torch into processes that do not need it. They are used only for models
    without a tokenizer.json.

    Raises:
        OSError, ValueError, KeyError: the model has no tokenizer, or none of the `tokenizers` library.
    """
    if cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is not None:
        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of `{model}` has no `tokenizers` backend (tokenizer.json)")
    return tokenizer
