"""Tokens of a model: those of its tokenizer, and those that end a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import load_tokenizer

_MAX_SHOWN_TOKENS = 5
"""Most tokens that one note names."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a model."""

    tokenizer: PreTrainedTokenizerFast | None
    """None: the model's directory has no tokenizer files."""
    size: int
    """Number of tokens that the model has a row for."""
    configured_eos_ids: frozenset[int]
    """Tokens that end a sequence by the generation config, or else by the model's config."""

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, size: int) -> Vocabulary:
        """Return the tokens of a model, or of the part that a rank has, of `size` in all."""
        configs = (model.generation_config, model.config.get_text_config(decoder=True))
        named = (getattr(config, "eos_token_id", None) for config in configs)
        ids: int | list[int] = next((ids for ids in named if ids is not None), [])
        return cls(tokenizer, size, frozenset(ids if isinstance(ids, list) else [ids]))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: those of the configs, and the tokenizer's."""
        end_id = getattr(self.tokenizer, "eos_token_id", None)
        ids = self.configured_eos_ids if end_id is None else self.configured_eos_ids | {end_id}
        return frozenset(token_id for token_id in ids if 0 <= token_id < self.size)

    def notes(self, *, generates: bool) -> Iterator[str]:
        """Yield a sentence for each fault with which the model is served all the same."""
        known = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        unknown = sorted((token_id, token) for token, token_id in known.items() if token_id >= self.size)
        if unknown:
            shown = ", ".join(f"`{token}` ({token_id})" for token_id, token in unknown[:_MAX_SHOWN_TOKENS])
            more = f" and {len(unknown) - _MAX_SHOWN_TOKENS} more" if len(unknown) > _MAX_SHOWN_TOKENS else ""
            yield f"the model has {self.size} tokens; its tokenizer also has {shown}{more}: texts with them are refused"
        if generates:
            yield from self._eos_notes()

    def _eos_notes(self) -> Iterator[str]:
        """Yield a note if the configs name end tokens that the model lacks, and one if they lack the tokenizer's."""
        unknown = sorted(token_id for token_id in self.configured_eos_ids if not 0 <= token_id < self.size)
        if unknown:
            listed = ", ".join(map(str, unknown))
            yield f"the model has {self.size} tokens; its eos_token_id also names {listed}, which it never generates"
        tokenizer, configured_ids = self.tokenizer, self.configured_eos_ids
        token_id = None if tokenizer is None else tokenizer.eos_token_id
        if tokenizer is None or token_id is None or token_id in configured_ids or token_id >= self.size:
            return
        token, listed = f"`{tokenizer.eos_token}` ({token_id})", ", ".join(map(str, sorted(configured_ids))) or "none"
        yield f"eos_token_id ({listed}) lacks the tokenizer's end token {token}, which ends a sequence all the same"


def tokenizer_of(model: str) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a model; None if its directory has no tokenizer files.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    directory = Path(model)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return load_tokenizer(model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of model {model!r}: {error}") from error
