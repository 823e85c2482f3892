"""Files of sentence-transformers in a checkpoint: its modules, their settings and weights, and its prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import model_file

_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class StoredModule:
    """Module of a checkpoint in the format of sentence-transformers."""

    kind: str
    """Name of its class, such as `Pooling`."""
    model: str
    """Directory or hub id of the checkpoint."""
    folder: str
    """Folder with its files; empty: the checkpoint's own."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def modes(self) -> list[str]:
        """Modes of a pooling, whose results stand one after another. Older files have a flag for each."""
        named = self.settings.get("pooling_mode")
        if named is not None:
            return [named] if isinstance(named, str) else list(named)
        return [mode for flag, mode in _OLD_FLAGS.items() if self.settings.get(flag)] or ["mean"]

    def weights(self) -> dict[str, Tensor]:
        """Return the module's weights in float32.

        Raises:
            ModelLoadError: they are not in a safetensors file.
        """
        path = model_file(self.model, f"{self.folder}/model.safetensors")
        if path is None:
            raise ModelLoadError(f"model {self.model!r} has no {self.folder}/model.safetensors")
        return {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}


@dataclass(frozen=True, slots=True)
class StoredPrompts:
    """Prompts of a checkpoint: texts that go before a text, by name."""

    texts: tuple[tuple[str, str], ...] = ()
    default: str | None = None


def stored_modules(model: str) -> list[StoredModule]:
    """Return the modules of `model`, a directory or hub id, in their order; empty: it has none.

    Raises:
        ModelLoadError: the files cannot be read.
    """
    listed = _read(model, "modules.json")
    if listed is None:
        return []
    try:
        entries = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in listed]
    except (TypeError, KeyError) as error:
        raise ModelLoadError(f"modules.json of model {model!r} is no list of modules: {error!r}") from None
    return [
        StoredModule(kind, model, folder, (_read(model, f"{folder}/config.json") or {}) if folder else {})
        for kind, folder in entries
    ]


def stored_weights(model: str, name_start: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights of `model` whose names begin with one of these, in float32."""
    index = _read(model, "model.safetensors.index.json")
    files = ["model.safetensors"] if index is None else sorted(set(index["weight_map"].values()))
    found: dict[str, Tensor] = {}
    for path in filter(None, (model_file(model, name) for name in files)):
        with safe_open(path, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(tuple(name_start))]  # noqa: SIM118  # no mapping
            found |= {name: opened.get_tensor(name).to(torch.float32) for name in names}
    return found


def stored_settings(model: str) -> dict[str, Any]:
    """Return the settings of `model` that belong to no module: config_sentence_transformers.json."""
    return _read(model, "config_sentence_transformers.json") or {}


def stored_prompts(model: str) -> StoredPrompts:
    """Return the prompts of `model`."""
    settings = stored_settings(model)
    texts = tuple((name, text) for name, text in (settings.get("prompts") or {}).items() if isinstance(text, str))
    return StoredPrompts(texts, settings.get("default_prompt_name"))


def stored_max_tokens(model: str) -> int | None:
    """Return the most tokens of a text of `model`; None: its files name no number."""
    limit = (_read(model, "sentence_bert_config.json") or {}).get("max_seq_length")
    return limit if isinstance(limit, int) else None


def _read(model: str, name: str) -> Any:
    path: Path | None = model_file(model, name)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{name} of model {model!r} is not JSON: {error}") from error
