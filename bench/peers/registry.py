"""Registry of the engines to compare with, and of the files each needs."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

_HOME = "~/"


@dataclass(frozen=True, slots=True)
class Peer:
    """Engine with the command of its runner."""

    name: str
    module: str
    """Module of the runner, started with `python -m`."""
    python: str = sys.executable
    """Interpreter of the engine's virtual environment."""
    requires: tuple[str, ...] = ()
    """Further files that an installed engine has."""
    model: str | None = None
    """Model in the engine's own format; None: the directory that the other engines load."""
    modes: str = "workload,single,decode"
    arguments: tuple[str, ...] = ()

    def missing(self, model_directory: Path) -> list[str]:
        """Return the needed files that do not exist."""
        needed = [self.python, *self.requires, self._model(model_directory)]
        return [path for path in needed if not Path(path).expanduser().exists()]

    def command(self, model_directory: Path, options: Sequence[str]) -> list[str]:
        """Return the command of the runner; `options` come last."""
        model = _expand(self._model(model_directory))
        own = [_expand(argument.replace("{model}", model)) for argument in self.arguments]
        about = ["--model", model, "--tag", model_directory.name, "--note", self.name]
        return [_expand(self.python), "-m", self.module, *about, *own, *options]

    def _model(self, model_directory: Path) -> str:
        if self.model is None:
            return str(model_directory)
        return self.model.replace("{shape}", model_directory.name)


def read_peers(file: Path) -> list[Peer]:
    """Return the engines of a file like `peers.toml`, in its order."""
    return TypeAdapter(list[Peer]).validate_python(tomllib.loads(file.read_text())["peer"])


def _expand(text: str) -> str:
    """Replace `~/` by the home directory at the beginning of each word."""
    home = f"{Path.home()}/"
    words = (home + word.removeprefix(_HOME) if word.startswith(_HOME) else word for word in text.split(" "))
    return " ".join(words)
