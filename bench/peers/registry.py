"""Which engines can be run here."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HOME = "~/"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine and how its runner is started."""

    name: str
    module: str
    """The runner, started with `python -m`."""
    python: str = sys.executable
    """The interpreter of its virtual environment."""
    requires: tuple[str, ...] = ()
    """Other files without which it is not installed."""
    model: str | None = None
    """The model in its own format; None: the directory that all others load."""
    modes: str = "workload,single,decode"
    arguments: tuple[str, ...] = ()

    def missing(self, model_directory: Path) -> list[str]:
        """Files that it needs and that are not there."""
        needed = [self.python, *self.requires, self._model(model_directory)]
        return [path for path in needed if not Path(path).expanduser().exists()]

    def command(self, model_directory: Path, options: Sequence[str]) -> list[str]:
        """What starts its runner; `options` come last."""
        model = _expand(self._model(model_directory))
        own = [_expand(argument.replace("{model}", model)) for argument in self.arguments]
        about = ["--model", model, "--tag", model_directory.name, "--note", self.name]
        return [_expand(self.python), "-m", self.module, *about, *own, *options]

    def _model(self, model_directory: Path) -> str:
        if self.model is None:
            return str(model_directory)
        return self.model.replace("{shape}", model_directory.name)


def read_peers(file: Path) -> list[Peer]:
    """The engines that a file like `peers.toml` names, in its order."""
    return [_peer(entry) for entry in tomllib.loads(file.read_text())["peer"]]


def _peer(entry: dict[str, Any]) -> Peer:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Peer(**fields)


def _expand(text: str) -> str:
    """`~/` means the home directory wherever a word of the text begins with it."""
    home = f"{Path.home()}/"
    words = (home + word.removeprefix(_HOME) if word.startswith(_HOME) else word for word in text.split(" "))
    return " ".join(words)
