"""Checkpoints that cannot be served, each with the reason that a start must give."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint

_WEIGHTS = "model.safetensors"
_GGUF = "unknown.gguf"
_HUGE_BYTES = 2**42


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a checkpoint, and the part of the reason that names it."""

    apply: Callable[[Path], object]
    reason: str
    file: str = ""
    """File in the directory that is served instead of it; empty: the directory is served."""

    def served(self, model: Path) -> Path:
        """Return the path of the damaged checkpoint in the directory `model`."""
        return model / self.file if self.file else model


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


def lose_shard(model: Path) -> None:
    """Split the weights into two files, of which the second one is lost."""
    tensors = load_file(model / _WEIGHTS)
    (model / _WEIGHTS).unlink()
    names, shards = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[::2]}, model / shards[0], {"format": "pt"})
    weight_map = {name: shards[position % 2] for position, name in enumerate(names)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def enlarge(model: Path) -> None:
    """Make the weights larger than any machine's memory, in a file that takes no room on the disk."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [_HUGE_BYTES // 2], "data_offsets": [0, _HUGE_BYTES]}})
    with (model / _WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + _HUGE_BYTES)


def lie(model: Path) -> None:
    """Make the header name a shape for which its tensor has not enough bytes."""
    weights = model / _WEIGHTS
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [10**6]
    written = json.dumps(header).encode()
    weights.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])


def quantize_without_scales(model: Path) -> None:
    """Quantize the weights, and leave out the scales of one."""
    plain = model.rename(model.with_name("plain"))
    quantized = quantize_checkpoint(plain, model.with_name("written"), METHODS["compressed-tensors W4A16"])
    tensors = load_file(quantized / _WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, quantized / _WEIGHTS, {"format": "pt"})
    quantized.rename(model)


def pickle_weights(model: Path) -> None:
    """Replace the weights by a pickle that creates the file `executed` when it is loaded."""
    (model / _WEIGHTS).unlink()
    with (model / "pytorch_model.bin").open("wb") as file:
        pickle.dump(_Executed(model / "executed"), file)


@dataclass(frozen=True, slots=True)
class _Executed:
    """Object whose pickle creates a file when it is loaded."""

    path: Path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def write_unknown_gguf(model: Path) -> None:
    """Write a GGUF file of an architecture that nobody knows."""
    writer = gguf.GGUFWriter(model / _GGUF, "nonesuch")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


DAMAGES = {
    "no such directory": Damage(shutil.rmtree, "there is no directory"),
    "no config": Damage(lambda model: (model / "config.json").unlink(), "has no config.json"),
    "broken config": Damage(lambda model: (model / "config.json").write_text("{"), "is not a config"),
    "unknown architecture": Damage(edited(model_type="nonesuch"), "`nonesuch`"),
    "unsupported quantization": Damage(edited(quantization_config={"quant_method": "hqq"}), "is quantized (hqq)"),
    "missing weights": Damage(lambda model: (model / _WEIGHTS).unlink(), "there is no model.safetensors"),
    "missing shard": Damage(lose_shard, "there is no model-00002-of-00002.safetensors"),
    "truncated weights": Damage(truncate, "is truncated or damaged"),
    "file that lies about its sizes": Damage(lie, "cannot have"),
    "wrong shapes": Damage(edited(intermediate_size=96), "the config asks for"),
    "missing scales": Damage(quantize_without_scales, "lacks its model.layers.1.mlp.up_proj.weight_scale"),
    "pickled weights": Damage(pickle_weights, "since pickled weights can run code"),
    "GGUF of an unknown architecture": Damage(write_unknown_gguf, "architecture nonesuch", _GGUF),
    "too little memory": Damage(enlarge, "GiB of memory are free"),
}
"""Map from the name of a damage to it. The files alone show each."""
