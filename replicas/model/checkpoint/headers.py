"""Headers of a checkpoint's safetensors files. The module imports no torch, so `headway serve` can check at once."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a file."""

    file: Path
    name: str
    """Name in the file."""
    dtype: str
    """Name of its dtype in safetensors, such as BF16."""
    shape: tuple[int, ...]
    begin: int
    """Position of its first byte in the file."""

    @property
    def num_values(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)

    def read_bytes(self) -> bytes:
        """Read its bytes; meant for small tensors."""
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            return stream.read(self.num_values * _BITS[self.dtype] // 8)


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files of a checkpoint by name, without reading their values.

    Raises:
        ModelLoadError: a file is missing or not whole, or its header does not agree with itself.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(directory):
        tensors.update(_read_header(file))
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    # transformers, too, takes the single file if there are both: a fine-tune may be saved over a model in shards.
    if index.is_file() and not (directory / _WEIGHTS).is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not an index of weights: {error!r}") from error
    else:
        names = [_WEIGHTS]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        others = sorted(path.name for path in directory.glob("*.bin")) if missing == [_WEIGHTS] else []
        hint = (
            f"; {', '.join(others)} cannot be read: Headway reads safetensors only, since pickled weights can run code"
            if others
            else ""
        )
        raise ModelLoadError(f"{directory} lacks its weights: there is no {', '.join(missing)}{hint}")
    return [directory / name for name in names]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file. Its header must agree with its size."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        spans = {name: _span(name, entry) for name, entry in header.items()}
        data_begin = _LENGTH_BYTES + length
        tensors = {
            name: StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), data_begin + spans[name][0])
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is not a safetensors file: {error}") from error
    _check_size(file, data_begin, sorted(spans.values()))
    return tensors


def _span(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    """Return the begin and the end of a tensor's bytes, which must have room for exactly its shape."""
    begin, end = entry["data_offsets"]
    shape, dtype = entry["shape"], entry["dtype"]
    if dtype not in _BITS:
        raise ValueError(f"the tensor {name} has the unknown dtype {dtype}")
    if min(shape, default=0) < 0 or math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        raise ValueError(f"the tensor {name} of shape {shape} in {dtype} cannot have {end - begin} bytes")
    return begin, end


def _check_size(file: Path, data_begin: int, spans: list[tuple[int, int]]) -> None:
    """Check that tensors, in order of their spans, follow each other without gaps up to the end of the file."""
    expected = data_begin + max((end for _, end in spans), default=0)
    size = file.stat().st_size
    if size != expected:
        raise ModelLoadError(f"{file} is truncated or damaged: it has {size:,} bytes, its header says {expected:,}")
    previous = 0
    for begin, end in spans:
        if begin != previous:
            raise ModelLoadError(f"{file} is not a safetensors file: its tensors overlap or have gaps at byte {begin}")
        previous = end
