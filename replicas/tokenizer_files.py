"""A model's tokenizer, as its files say."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of `model`, a directory or hub id; no code that comes with it is run.

    tokenizer.json alone says how texts are split. transformers' classes for families of models may say otherwise, and
    bring torch into processes that need none: they are for models that have no such file.

    Raises:
        OSError, ValueError, KeyError: it has no tokenizer, or none of the `tokenizers` library.
    """
    if cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is not None:
        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of `{model}` has no `tokenizers` backend (tokenizer.json)")
    return tokenizer
