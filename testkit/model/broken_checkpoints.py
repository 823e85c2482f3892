"""Checkpoints that cannot be served, each with the reason that a start must give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_WEIGHTS = "model.safetensors"
_HUGE_BYTES = 2**42


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a checkpoint, and the part of the reason that names it."""

    apply: Callable[[Path], object]
    reason: str


def edited(**fields: object) -> Callable[[Path], object]:
    """Return a damage: other fields in the config."""

    def edit(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def truncate(model: Path) -> None:
    """Cut off the end of the weights."""
    weights = model / _WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])


def enlarge(model: Path) -> None:
    """Make the weights larger than any machine's memory, in a file that takes no room on the disk."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [_HUGE_BYTES // 2], "data_offsets": [0, _HUGE_BYTES]}})
    with (model / _WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + _HUGE_BYTES)


DAMAGES = {
    "no such directory": Damage(shutil.rmtree, "there is no directory"),
    "no config": Damage(lambda model: (model / "config.json").unlink(), "has no config.json"),
    "broken config": Damage(lambda model: (model / "config.json").write_text("{"), "is not a config"),
    "unknown architecture": Damage(edited(model_type="nonesuch"), "`nonesuch`"),
    "unsupported quantization": Damage(edited(quantization_config={"quant_method": "hqq"}), "is quantized (hqq)"),
    "missing weights": Damage(lambda model: (model / _WEIGHTS).unlink(), "there is no model.safetensors"),
    "truncated weights": Damage(truncate, "is truncated or damaged"),
    "too little memory": Damage(enlarge, "GiB of memory are free"),
}
"""Map from the name of a damage to it. The files alone show each."""
