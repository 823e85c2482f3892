"""Command line of `headway serve`, before its options are read: names of options and lists as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

_NAMES = "--served-model-name"


def with_dashes(name: str) -> str:
    """Return the name of an option with dashes: underscores stand for them, as in `--max_num_seqs`."""
    return name.replace("_", "-")


class ServeCommand(TyperCommand):
    """Command whose option `--served-model-name` takes several names, where the model is given before."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line."""
        return super().parse_args(ctx, list(_one_name_each(args)))


def _one_name_each(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with the option before each of several names: `m --served-model-name a b`.

    Without a model before them, the word behind a name is the model: `--served-model-name a m`.
    """
    has_model = bool(words) and (not words[0].startswith("-") or any(word.split("=")[0] == "--model" for word in words))
    num_names = None  # None: the words behind are no names
    for word in words:
        if with_dashes(word) == _NAMES:
            num_names = 0
        elif num_names is not None and not word.startswith("-") and "=" not in word:
            if has_model and num_names:
                yield _NAMES
            num_names += 1
        else:
            num_names = None
        yield word
